"""What FairBatch is compared with."""

import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, Subset, default_collate

from fairbatch_lightning import FairBatch, FairBatchWarning, FairSampler
from fairbatch_lightning.baselines import (
    AdversarialDebiasing,
    Boosting,
    Cutting,
    FairDRO,
    FairnessConstraints,
    GroupDRO,
    Resampling,
    Reweighing,
)
from fairbatch_lightning.baselines.base import Baseline
from fairbatch_lightning.baselines.constraints import covariances, log_odds
from fairbatch_lightning.baselines.loss_changing import LossChanging
from fairbatch_lightning.baselines.robust import worst_shares
from fairbatch_lightning.groups import GroupIndex


def cells(toy):
    return torch.bincount(toy.targets * 3 + toy.group_ids, minlength=6).view(2, 3)


class OnFirst(ToyModule):
    """Trains on the first of several loaders."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


def trained_on(module):
    return torch.tensor([index for batch in module.batches for index in batch])


class TestSizes:
    """Against counting by hand, for random data with empty cells."""

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("criterion", ["equalized_odds", "equal_opportunity", "demographic_parity"])
    def test_sizes(self, criterion, seed):
        random = np.random.default_rng(seed)
        labels, groups = (
            random.integers(3, size=200),
            random.choice(["a", "b", "c", "d"], 200, p=[0.6, 0.3, 0.05, 0.05]),
        )
        labels[(groups == "d") & (labels == 2)] = 0
        kept = Cutting(criterion, groups="group", seed=seed).samples(GroupIndex.from_values(labels, groups))
        assert len(set(kept.tolist())) == len(kept)
        before, after = (count(labels[part], groups[part]) for part in (slice(None), kept))
        if criterion == "demographic_parity":
            totals = {group: sum(n for (_, other), n in after.items() if other == group) for group in "abcd"}
            assert set(totals.values()) == {min((groups == group).sum() for group in "abcd")}
            return
        for label in range(3):
            present = [before[label, group] for group in "abcd" if (label, group) in before]
            for group in "abcd":
                if (label, group) in before:
                    untouched = criterion == "equal_opportunity" and label != 1
                    assert after[label, group] == (before[label, group] if untouched else min(present))

    def test_nothing_to_cut(self):
        index = GroupIndex.from_values([0, 0, 1, 1], ["a", "b", "a", "b"])
        assert Cutting(groups="group").samples(index).tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("criterion", ["equalized_odds", "equal_opportunity"])
    def test_across_labels(self, criterion):
        index = GroupIndex.from_values([0, 0, 0, 0, 0, 1, 1, 1, 1], ["a", "a", "a", "b", "b", "a", "a", "a", "b"])
        for kind, size in ((Cutting, 1), (Boosting, 3)):
            kept = index.part(kind(criterion, groups="group", across_labels=True).samples(index))
            assert kept.counts.tolist() == [[size, size], [size, size]]
        with pytest.raises(ValueError, match=r"`across_labels` to be left out with .demographic_parity."):
            Cutting("demographic_parity", groups="group", across_labels=True)


def count(labels, groups):
    pairs, numbers = np.unique([f"{y}{z}" for y, z in zip(labels, groups, strict=True)], return_counts=True)
    return {(int(pair[0]), pair[1]): int(number) for pair, number in zip(pairs, numbers, strict=True)}


class TestCutting:
    def test_every_sample_that_is_left_is_trained_on_once_per_epoch(self):
        toy, module, cutting = Toy(), ToyModule(), Cutting(groups="group")
        trainer(cutting, max_epochs=3).fit(module, loader(toy, batch_size=7))
        smallest = cells(toy).min(1, keepdim=True).values.expand(2, 3)
        assert torch.equal(cutting.counts, smallest)
        seen = torch.bincount(trained_on(module), minlength=len(toy))
        assert (seen > 0).sum() == smallest.sum()
        assert seen.max() - seen[seen > 0].min() <= 1  # the last batch of each epoch is filled up

    def test_order_changes_but_what_is_left_does_not(self):
        toy, modules = Toy(), [ToyModule(), ToyModule(), ToyModule()]
        for module, seed in zip(modules, (0, 0, 1), strict=True):
            trainer(Cutting(groups="group", seed=seed), max_epochs=2).fit(module, loader(toy, drop_last=True))
        assert modules[0].batches == modules[1].batches
        assert set(trained_on(modules[0]).tolist()) != set(trained_on(modules[2]).tolist())
        half = len(modules[0].batches) // 2
        assert modules[0].batches[:half] != modules[0].batches[half:]

    def test_the_users_loader_is_untouched(self):
        data = loader()
        before = dict(vars(data))
        run = trainer(Cutting(groups="group"), max_epochs=1)
        run.fit(ToyModule(), data)
        assert vars(data) == before
        assert "dataloader" not in vars(run.fit_loop._data_source)

    def test_worker_processes_and_several_loaders(self):
        toy, module = Toy(), OnFirst()
        data = {"a": loader(toy, num_workers=1), "b": DataLoader(Toy(40), batch_size=20)}
        cutting = Cutting(groups="group", loader="a")
        trainer(cutting, max_epochs=1, limit_train_batches=3).fit(module, data)
        kept = cutting.samples(GroupIndex.from_dataset(toy, groups="group"))
        assert int(cutting.counts.sum()) == len(kept) < 240
        assert set(trained_on(module).tolist()) <= set(kept.tolist())

    def test_equal_opportunity_by_name(self):
        toy, cutting = Toy(), Cutting("equal_opportunity", groups="group", positive_label=0)
        trainer(cutting, max_epochs=1).fit(ToyModule(), loader(toy))
        assert torch.equal(cutting.counts[1], cells(toy)[1])
        assert len(set(cutting.counts[0].tolist())) == 1

    @pytest.mark.parametrize("workers", [0, 2])
    def test_resumes_in_the_middle_of_an_epoch(self, workers, tmp_path):
        whole, first, second = ToyModule(), ToyModule(), ToyModule()
        trainer(Cutting(groups="group"), max_epochs=2).fit(whole, loader(batch_size=10, num_workers=workers))
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        run = trainer(Cutting(groups="group"), keep, max_epochs=2, enable_checkpointing=True)
        run.fit(first, loader(batch_size=10, num_workers=workers))
        resume(trainer(Cutting(groups="group"), max_epochs=2), second, loader(batch_size=10), tmp_path / "step=3.ckpt")
        assert first.batches == whole.batches
        assert second.batches == whole.batches[3:]

    def test_resumes_where_loaders_are_reloaded(self, tmp_path):
        whole, first, second = ToyModule(), ToyModule(), ToyModule()
        options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
        trainer(Cutting(groups="group"), **options).fit(whole, loader(batch_size=10))
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        trainer(Cutting(groups="group"), keep, **options, enable_checkpointing=True).fit(first, loader(batch_size=10))
        resume(trainer(Cutting(groups="group"), **options), second, loader(batch_size=10), tmp_path / "step=3.ckpt")
        assert second.batches == whole.batches[3:]

    def test_messages_speak_of_it(self):
        with pytest.raises(
            ValueError, match=r"Cutting acts on one train DataLoader but got 2. Name it, Cutting\(loader=0"
        ):
            trainer(Cutting(groups="group")).fit(ToyModule(), [loader(), loader()])

    def test_demographic_parity_has_no_positive_label_here(self):
        toy = Toy()
        toy.targets = toy.targets * 2
        cutting = Cutting("demographic_parity", groups="group")
        trainer(cutting, max_epochs=1).fit(ToyModule(num_labels=3), loader(toy))
        assert len(set(cutting.counts.sum(0).tolist())) == 1
        with pytest.raises(ValueError, match=r"`positive_label` to be one of the data's labels \[0, 2\] but got 1"):
            trainer(Cutting("equal_opportunity", groups="group")).fit(ToyModule(num_labels=3), loader(toy))

    def test_bad_input(self):
        for criterion in ("fair", ["race"]):
            with pytest.raises(ValueError, match=r"one of .*equalized_odds.* but got .*(fair|race)"):
                Cutting(criterion)
        with pytest.raises(ValueError, match="Found no groups in Toy"):
            trainer(Cutting(groups="rce")).fit(ToyModule(), loader())

    def test_training_can_go_on_after_an_error(self):
        run = trainer(Cutting(groups="nowhere"))
        with pytest.raises(ValueError, match="Found no groups"):
            run.fit(ToyModule(), loader())
        assert "dataloader" not in vars(run.fit_loop._data_source)


METHODS = {
    "cutting": lambda **settings: Cutting(groups="group", **settings),
    "boosting": lambda **settings: Boosting(groups="group", **settings),
    "reweighing": lambda **settings: Reweighing(groups="group", **settings),
    "resampling": lambda **settings: Resampling(groups="group", **settings),
    "group dro": lambda **settings: GroupDRO(groups="group", step_size=0.5, **settings),
    "fair dro": lambda **settings: FairDRO(groups="group", alpha=0.5, **settings),
    "constraints": lambda **settings: FairnessConstraints(groups="group", **settings),
    "adversary": lambda **settings: AdversarialDebiasing(groups="group", lr=0.05, **settings),
}
CHANGE_LOSS = ["reweighing", "group dro", "constraints", "adversary"]


class TestEveryMethod:
    """What is promised of all of them."""

    @pytest.mark.slow
    @pytest.mark.parametrize("method", METHODS)
    def test_resumes_in_the_middle_of_an_epoch(self, method, tmp_path):
        new, options = METHODS[method], {"max_epochs": 3}
        whole, first, second = ToyModule(), ToyModule(), ToyModule()
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
        trainer(new(), **options).fit(whole, loader(batch_size=10))
        trainer(new(), keep, **options, enable_checkpointing=True).fit(first, loader(batch_size=10, num_workers=2))
        resume(trainer(new(), **options), second, loader(batch_size=10), tmp_path / "step=8.ckpt")
        assert first.batches == whole.batches
        assert second.batches == whole.batches[8:]
        assert torch.equal(second.net.weight, whole.net.weight)

    @pytest.mark.parametrize("method", METHODS)
    def test_changes_the_model(self, method):
        """Compared with a baseline that changes nothing, and so trains on the same order of samples."""
        plain, fair = ToyModule(), ToyModule()
        trainer(Baseline(groups="group"), max_epochs=1).fit(plain, loader())
        trainer(METHODS[method](), max_epochs=1).fit(fair, loader())
        assert not torch.allclose(plain.net.weight, fair.net.weight, atol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("method", METHODS)
    def test_resumes_where_loaders_are_made_twice(self, method, tmp_path):
        """A learning rate schedule that asks how long the training is has the first loader replaced by another."""

        class Scheduled(ToyModule):
            def configure_optimizers(self):
                assert self.trainer.estimated_stepping_batches > 17
                return super().configure_optimizers()

        options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
        whole, first, second = Scheduled(), Scheduled(), Scheduled()
        new, keep = METHODS[method], ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=17, save_top_k=-1)
        trainer(new(), **options).fit(whole, loader(batch_size=10))
        trainer(new(), keep, **options, enable_checkpointing=True).fit(first, loader(batch_size=10))
        resume(trainer(new(), **options), second, loader(batch_size=10), tmp_path / "step=17.ckpt")
        assert second.batches == whole.batches[17:]
        assert torch.equal(second.net.weight, whole.net.weight)

    @pytest.mark.parametrize("method", METHODS)
    def test_training_goes_on_in_another_fit(self, method):
        """Of the same Trainer, with more epochs, as if there had been one."""
        whole, parts = ToyModule(), ToyModule()
        trainer(METHODS[method](), max_epochs=3).fit(whole, loader())
        run = trainer(METHODS[method](), max_epochs=2)
        run.fit(parts, loader())
        run.fit_loop.max_epochs = 3
        run.fit(parts, loader())
        assert parts.batches == whole.batches
        torch.testing.assert_close(parts.net.weight, whole.net.weight)

    @pytest.mark.parametrize("method", METHODS)
    def test_other_cells_in_a_reloaded_training_set(self, method):
        class Shrinks(ToyModule):
            def train_dataloader(self):
                kept = range(240) if self.current_epoch == 0 else [i for i in range(240) if Toy().group_ids[i] < 2]
                return loader(Subset(Toy(), list(kept)))

        with pytest.raises(ValueError, match="the reloaded training set to have samples in the cells"):
            trainer(METHODS[method](), reload_dataloaders_every_n_epochs=1).fit(Shrinks())

    @pytest.mark.parametrize("method", METHODS)
    def test_overfitting_on_purpose(self, method):
        run = trainer(METHODS[method](), overfit_batches=2, max_epochs=1)
        with pytest.warns(FairBatchWarning, match="stays inactive"):
            run.fit(ToyModule(), loader())
        assert run.global_step == 2

    @pytest.mark.slow
    @pytest.mark.parametrize("method", CHANGE_LOSS)
    @pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
    def test_precision(self, method, precision):
        run = trainer(METHODS[method](), precision=precision, max_epochs=1)
        run.fit(ToyModule(), loader())
        assert run.global_step > 5

    @pytest.mark.parametrize("method", METHODS)
    def test_can_be_pickled_after_a_fit(self, method):
        callback = METHODS[method]()
        trainer(callback, max_epochs=1).fit(ToyModule(), loader())
        assert torch.equal(pickle.loads(pickle.dumps(callback)).counts, callback.counts)

    def test_epochs_have_the_length_of_the_users_sampler(self):
        sampler = RandomSampler(range(240), replacement=True, num_samples=1000)
        run = trainer(Reweighing(groups="group"), max_epochs=1)
        run.fit(ToyModule(), DataLoader(Toy(), batch_size=20, sampler=sampler))
        assert run.global_step == 50

    @pytest.mark.parametrize("method", METHODS)
    def test_leaves_no_trace(self, method):
        data, module = loader(), ToyModule()
        before = dict(vars(data))
        run = trainer(METHODS[method](), max_epochs=1)
        run.fit(module, data)
        assert vars(data) == before
        assert "dataloader" not in vars(run.fit_loop._data_source)
        assert "training_step" not in vars(module)
        assert not module._forward_hooks

    @pytest.mark.parametrize("method", METHODS)
    def test_not_together_with_fairbatch(self, method):
        with pytest.raises(ValueError, match=r"one (way|FairBatch)"):
            trainer(METHODS[method](), FairBatch(groups="group")).fit(ToyModule(), loader())

    @pytest.mark.parametrize("method", CHANGE_LOSS)
    def test_manual_optimization_is_refused(self, method):
        module = ToyModule()
        module.automatic_optimization = False
        with pytest.raises(RuntimeError, match="Use automatic optimization"):
            trainer(METHODS[method]()).fit(module, loader())

    @pytest.mark.parametrize("method", CHANGE_LOSS)
    def test_logits_out_of_reach(self, method):
        class Hidden(ToyModule):
            def forward(self, x):
                return {"scores": self.net(x)}

            def training_step(self, batch, batch_idx):
                return functional.cross_entropy(self(batch[0])["scores"], batch[1])

        with pytest.raises(RuntimeError, match=r"found no logits.*\(logits=\"net\"\)"):
            trainer(METHODS[method]()).fit(Hidden(), loader())
        run = trainer(METHODS[method](logits="net"), max_epochs=1)
        run.fit(Hidden(), loader())
        assert run.global_step == 12

    @pytest.mark.parametrize("kind", ["steps take the loader", "a batch is left out", "validation uses the step"])
    def test_losses_are_those_of_the_batch(self, kind):
        """However Lightning comes by its batches: the cells are those of the samples that are trained on."""
        toy, seen = Toy(), []

        class Checked(LossChanging):
            def loss_term(self, logits, losses, cells):
                seen.append((losses.detach(), cells))
                return 0 * losses.mean()

        class Module(ToyModule):
            def __init__(self):
                super().__init__()
                self.expected = []

            def loss(self, batch):
                x, y, index = batch
                logits = self(x)
                if self.training:
                    self.batches.append(index.tolist())
                    losses = functional.cross_entropy(logits, y, reduction="none")
                    self.expected.append((losses.detach(), y * 3 + toy.group_ids[index]))
                return functional.cross_entropy(logits, y)

            def training_step(self, batch, batch_idx):
                return self.loss(batch)

        class TakesLoader(Module):
            def training_step(self, dataloader_iter):
                batch, _, _ = next(dataloader_iter)
                return self.loss(batch)

        class Validates(Module):
            def validation_step(self, batch, batch_idx):
                self.training_step(batch, batch_idx)

        numbers = itertools.count()

        def leave_out(samples):
            return None if next(numbers) == 2 else default_collate(samples)

        module = {"steps take the loader": TakesLoader, "validation uses the step": Validates}.get(kind, Module)()
        collate = leave_out if kind == "a batch is left out" else None
        options = {"val_check_interval": 2} if kind == "validation uses the step" else {}
        held_out = DataLoader(Toy(40), batch_size=20) if options else None
        trainer(Checked(groups="group"), max_epochs=2, **options).fit(module, loader(toy, collate_fn=collate), held_out)
        assert len(seen) == len(module.expected) > 10
        for (losses, cells), (expected, own) in zip(seen, module.expected, strict=True):
            assert torch.equal(cells, own)
            torch.testing.assert_close(losses, expected)

    @pytest.mark.parametrize("method", CHANGE_LOSS)
    def test_returned_logits_come_before_those_of_the_module(self, method):
        class Features(ToyModule):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Linear(4, 4)

            def forward(self, x):
                return self.first(x)

            def training_step(self, batch, batch_idx):
                logits = self.net(self(batch[0]))
                return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

        class Direct(Features):
            def forward(self, x):
                return self.net(self.first(x))

            def training_step(self, batch, batch_idx):
                return functional.cross_entropy(self(batch[0]), batch[1])

        modules = [Features(), Direct()]
        for module in modules:
            trainer(METHODS[method](), max_epochs=1).fit(module, loader())
        torch.testing.assert_close(modules[0].net.weight, modules[1].net.weight)

    @pytest.mark.parametrize("method", CHANGE_LOSS)
    def test_logits_without_a_gradient(self, method):
        class Detached(ToyModule):
            def training_step(self, batch, batch_idx):
                logits = self.net(batch[0])
                return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits.detach()}

        with pytest.raises(RuntimeError, match="gradient is lost"):
            trainer(METHODS[method]()).fit(Detached(), loader())
        with pytest.raises(RuntimeError, match="`loss` that can be differentiated"):
            trainer(METHODS[method](loss="error")).fit(ToyModule(), loader())

    @pytest.mark.parametrize("method", CHANGE_LOSS)
    def test_submodules_that_are_built_late_and_steps_that_are_wrapped(self, method):
        def wrapped(step):
            @functools.wraps(step)
            def inner(self, *arguments):
                return step(self, *arguments)

            return inner

        class Late(ToyModule):
            def __init__(self):
                super().__init__()
                self.net = None

            def configure_model(self):
                self.net = torch.nn.Linear(4, 2)

            @wrapped
            def training_step(self, batch):
                return functional.cross_entropy(self.net(batch[0]), batch[1])

        run = trainer(METHODS[method](logits="net"), max_epochs=1)
        run.fit(Late(), loader())
        assert run.global_step == 12

    @pytest.mark.parametrize("method", CHANGE_LOSS)
    def test_logits_and_loss_in_a_dict(self, method):
        class InDict(ToyModule):
            def training_step(self, batch, batch_idx):
                logits = self.net(batch[0])
                return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

        plain, other = ToyModule(), InDict()
        for module in (plain, other):
            trainer(METHODS[method](), max_epochs=1).fit(module, loader())
        torch.testing.assert_close(plain.net.weight, other.net.weight)


class Recording(ToyModule):
    """Keeps its weights before every step, to compute by hand what the step should have been."""

    def __init__(self):
        super().__init__()
        self.trace = []

    def on_train_batch_start(self, batch, batch_idx):
        self.trace.append(({name: value.clone() for name, value in self.net.state_dict().items()}, batch))

    def replay(self, loss_of):
        """Assert that each step was one of SGD on the loss that a function gives for logits, labels and groups."""
        ends = [weights for weights, _ in self.trace[1:]] + [self.net.state_dict()]
        for (weights, (x, y, index)), after in zip(self.trace, ends, strict=True):
            net = torch.nn.Linear(4, 2)
            net.load_state_dict(weights)
            loss_of(net(x), y, Toy().group_ids[index]).backward()
            for name, value in net.named_parameters():
                torch.testing.assert_close(after[name], value - self.lr * value.grad)


class TestReweighing:
    def test_steps_are_those_of_the_weighted_loss(self):
        toy, module = Toy(), Recording()
        trainer(Reweighing(groups="group"), max_epochs=1).fit(module, loader(toy))
        counts = cells(toy)

        def weighted(logits, y, z):
            weights = [
                float((toy.targets == a).sum() * (toy.group_ids == b).sum() / 240 / counts[a, b])
                for a, b in zip(y.tolist(), z.tolist(), strict=True)
            ]
            return (torch.tensor(weights) * functional.cross_entropy(logits, y, reduction="none")).mean()

        module.replay(weighted)

    def test_sampling_makes_labels_and_groups_independent(self):
        toy, module = Toy(), ToyModule()
        trainer(Resampling(groups="group"), max_epochs=5).fit(module, loader(toy))
        drawn = trained_on(module)
        table = torch.bincount(toy.targets[drawn] * 3 + toy.group_ids[drawn], minlength=6).view(2, 3) / len(drawn)
        expected = torch.bincount(toy.targets)[:, None] / 240 * torch.bincount(toy.group_ids) / 240
        torch.testing.assert_close(table, expected, atol=0.01, rtol=0)


class TestBoosting:
    def test_all_groups_are_as_large_as_the_largest(self):
        toy, module, boosting = Toy(), ToyModule(), Boosting(groups="group")
        trainer(boosting, max_epochs=1).fit(module, loader(toy, batch_size=1))
        largest = cells(toy).max(1, keepdim=True).values.expand(2, 3)
        assert torch.equal(boosting.counts, largest)
        drawn = trained_on(module)
        assert set(drawn.tolist()) == set(range(240))
        seen = torch.bincount(drawn)
        for cell in range(6):
            part = seen[toy.targets * 3 + toy.group_ids == cell]
            assert part.max() - part.min() <= 1


class TestGroupDRO:
    def test_steps_are_those_of_the_published_algorithm(self):
        module, callback = Recording(), GroupDRO(groups="group", step_size=0.3)
        trainer(callback, max_epochs=2).fit(module, loader())
        weights = torch.full((6,), 1 / 6)

        def robust(logits, y, z):
            losses = functional.cross_entropy(logits, y, reduction="none")
            total = 0
            for cell in range(6):
                if (y * 3 + z == cell).any():
                    weights[cell] *= torch.exp(0.3 * losses[y * 3 + z == cell].mean().detach())
            weights.div_(weights.sum())
            for cell in range(6):
                if (y * 3 + z == cell).any():
                    total = total + weights[cell] * losses[y * 3 + z == cell].mean()
            return total

        module.replay(robust)
        torch.testing.assert_close(callback.weights.flatten(), weights)

    def test_rare_cells_count_like_others(self):
        """Of four cells with constant losses a rare one is the worst: it gets the largest weight."""
        callback = GroupDRO(groups="group", step_size=0.01)
        counts = [100, 48, 48, 4]
        index = GroupIndex.from_values(np.repeat([0, 0, 1, 1], counts), np.repeat([0, 1, 0, 1], counts))
        callback.start(index, 20)
        sampler = FairSampler.from_index(index, 20)
        losses = torch.tensor([1.0, 1.0, 1.0, 3.0])
        for _ in range(20):
            for batch in sampler.batches():
                cells = torch.from_numpy(index.cells[batch].astype(np.int64))
                callback.loss_term(None, losses[cells], cells)
        assert callback.weights.flatten().argmax() == 3
        expected = torch.softmax(0.01 * 200 * losses, 0)
        torch.testing.assert_close(callback.weights.flatten(), expected, atol=0.05, rtol=0.05)

    def test_bad_input(self):
        with pytest.raises(ValueError, match="step_size"):
            GroupDRO(groups="group", step_size=0)


class TestFairDRO:
    @pytest.mark.parametrize("radius", [0.01, 0.2, 0.5, 1.0, 5.0])
    def test_shares_are_the_worst_within_the_radius(self, radius):
        """No point of many within the radius is worse, and the result is within it itself."""
        random = np.random.default_rng(0)
        for _ in range(20):
            number = int(random.integers(2, 6))
            losses = torch.tensor(random.exponential(size=number))
            found = worst_shares(losses, radius)
            others = torch.tensor(random.dirichlet(np.full(number, 0.5), size=20_000))
            distance = ((number * others - 1) ** 2).sum(1) / (2 * number)
            assert float(((number * found - 1) ** 2).sum() / (2 * number)) <= radius + 1e-9
            assert float(found.sum()) == pytest.approx(1)
            assert found.min() >= 0
            if (distance <= radius).any():
                assert float((others[distance <= radius] @ losses).max()) <= float(found @ losses) + 1e-9

    def test_equal_losses_have_equal_shares(self):
        torch.testing.assert_close(worst_shares(torch.ones(4), 0.5), torch.full((4,), 0.25))

    def test_starts_with_equal_shares_and_moves_towards_the_worst(self):
        callback = FairDRO(groups="group", alpha=0.25, radius=0.1)
        trainer(callback, max_epochs=1).fit(ToyModule(), loader())
        record = callback.history[0]
        assert torch.equal(record.shares_before, torch.full((2, 3), 1 / 3, dtype=torch.float64))
        for row in range(2):
            expected = 0.75 / 3 + 0.25 * worst_shares(record.losses[row], 0.1)
            torch.testing.assert_close(record.shares_after[row], expected)

    def test_bad_input(self):
        with pytest.raises(ValueError, match="radius"):
            FairDRO(groups="group", radius=0)


def rates(module, toy):
    """Return the rates of positive predictions of the groups, and within the positive label."""
    with torch.no_grad():
        positive = module(toy.x).argmax(1).double()
    groups = range(3)
    overall = torch.stack([positive[toy.group_ids == z].mean() for z in groups])
    of_positives = torch.stack([positive[(toy.group_ids == z) & (toy.targets == 1)].mean() for z in groups])
    return overall, of_positives


class TestFairnessConstraints:
    def test_covariances_are_numpys(self):
        random = np.random.default_rng(0)
        values, groups = random.normal(size=50), random.integers(3, size=50)
        expected = [np.cov(values, groups == z, ddof=0)[0, 1] for z in range(3)]
        assert covariances(torch.tensor(values), torch.tensor(groups), 3).numpy() == pytest.approx(np.array(expected))

    def test_log_odds_of_classes_are_those_of_probabilities(self):
        logits, classes = torch.randn(20, 4, dtype=torch.float64), torch.randint(4, (20,))
        probability = logits.softmax(1)[torch.arange(20), classes]
        torch.testing.assert_close(log_odds(logits, classes), torch.log(probability / (1 - probability)))
        single = torch.randn(20)
        both = torch.stack([torch.zeros(20), single], 1)
        torch.testing.assert_close(log_odds(single, classes % 2), log_odds(both, classes % 2))

    @pytest.mark.parametrize("criterion", ["equalized_odds", "equal_opportunity", "demographic_parity"])
    def test_steps_are_those_of_the_penalised_loss(self, criterion):
        module = Recording()
        trainer(FairnessConstraints(criterion, groups="group", weight=0.7), max_epochs=1).fit(module, loader())

        def penalised(logits, y, z):
            margin = logits[:, 1] - logits[:, 0]
            parts = {"equalized_odds": [0, 1], "equal_opportunity": [1], "demographic_parity": [None]}[criterion]
            loss = functional.cross_entropy(logits, y)
            for label in parts:
                among = slice(None) if label is None else y == label
                value = margin[among] if label is None else ((2 * label - 1) * margin[among]).clamp(max=0)
                for group in range(3):
                    member = (z[among] == group).float()
                    loss = loss + 0.7 * ((member - member.mean()) * value).mean().abs()
            return loss

        module.replay(penalised)

    def test_makes_decisions_independent_of_the_group(self):
        toy, spreads = Toy(), []
        for weight in (0.0, 5.0):
            module = ToyModule()
            callback = FairnessConstraints("demographic_parity", groups="group", weight=weight)
            trainer(callback, max_epochs=30).fit(module, loader(toy, batch_size=60))
            overall, _ = rates(module, toy)
            spreads.append(float(overall.max() - overall.min()))
        assert spreads[1] < 0.7 * spreads[0]

    def test_bad_input(self):
        with pytest.raises(ValueError, match="weight"):
            FairnessConstraints(groups="group", weight=-1)


class Guessable(Toy):
    """The group is the third feature, which is no use for the label but goes together with it."""

    def __init__(self, num_samples=600, seed=0):
        super().__init__(num_samples, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        same = torch.rand(num_samples, generator=generator) < 0.8
        self.group_ids = torch.where(same, self.targets, 1 - self.targets)
        self.group = [("a", "b")[i] for i in self.group_ids]
        self.x[:, 2] = 2.0 * self.group_ids - 1


class TestAdversarialDebiasing:
    @pytest.mark.slow
    @pytest.mark.parametrize("criterion", ["equalized_odds", "equal_opportunity", "demographic_parity"])
    def test_the_model_forgets_the_group(self, criterion):
        dependence = []
        for weight in (0.0, 1.0):
            module, toy = ToyModule(lr=0.05), Guessable()
            callback = AdversarialDebiasing(criterion, groups="group", weight=weight, lr=0.02)
            trainer(callback, max_epochs=40).fit(module, loader(toy, batch_size=60))
            margin = module.net.weight[1] - module.net.weight[0]
            dependence.append(abs(float(margin[2])))
        assert dependence[1] < 0.5 * dependence[0]

    def test_the_adversary_learns(self):
        module, toy = ToyModule(), Guessable()
        callback = AdversarialDebiasing("demographic_parity", groups="group", weight=0.0, lr=0.02)
        trainer(callback, max_epochs=20).fit(module, loader(toy))
        with torch.no_grad():
            guesses = callback.adversary(module(toy.x)).argmax(1)
        assert (guesses == toy.group_ids).double().mean() > 0.75

    def test_without_weight_it_is_ordinary_training(self):
        """On the same batches, and with the same random numbers, as with a penalty of no weight."""
        found = []
        for method in (AdversarialDebiasing, FairnessConstraints):
            module = ToyModule()
            trainer(method(groups="group", weight=0.0), max_epochs=2).fit(module, loader())
            found.append((module.net.weight, torch.rand(1)))
        torch.testing.assert_close(*found)

    def test_the_adversary_learns_nothing_from_a_batch_without_positives(self):
        class Few(Toy):
            def __init__(self):
                super().__init__(60)
                self.targets[:] = 0
                self.targets[:2] = 1
                self.group = ["a", "b"] * 30

        changes = []

        class Watch(AdversarialDebiasing):
            def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
                before = [weight.clone() for weight in self.adversary.parameters()]
                super().on_train_batch_end(run, module, outputs, batch, batch_idx)
                same = all(torch.equal(*pair) for pair in zip(before, self.adversary.parameters(), strict=True))
                changes.append((bool((batch[1] == 1).any()), not same))

        callback = Watch("equal_opportunity", groups="group", lr=0.1)
        trainer(callback, max_epochs=3).fit(ToyModule(), loader(Few(), batch_size=5))
        assert len(changes) == 36
        assert all(positives == changed for positives, changed in changes)
        assert {positives for positives, _ in changes} == {True, False}

    @pytest.mark.parametrize("settings", [{"weight": -1}, {"lr": 0}])
    def test_bad_input(self, settings):
        with pytest.raises(ValueError, match=next(iter(settings))):
            AdversarialDebiasing(groups="group", **settings)
