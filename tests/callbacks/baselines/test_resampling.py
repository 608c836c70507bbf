"""Cutting and boosting: the sizes of the groups, against counting by hand."""

import numpy as np
import pytest
import torch
from by_hand import cells, trained_on
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fairbatch_lightning import EqualOpportunity, GroupIndex
from fairbatch_lightning.callbacks.baselines import Boosting, Cutting


class OnFirst(ToyModule):
    """Trains on the first of several loaders."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


class TestSizes:
    """Against counting by hand, for random data with empty cells."""

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize(
        "criterion",
        ["equalized_odds", "equal_opportunity", EqualOpportunity(positive_label=1), "demographic_parity"],
        ids=str,
    )
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
                    untouched = isinstance(criterion, EqualOpportunity) and label != 1
                    assert after[label, group] == (before[label, group] if untouched else min(present))

    @pytest.mark.parametrize("seed", range(3))
    def test_boosting_keeps_all_and_repeats_evenly(self, seed):
        random = np.random.default_rng(seed)
        index = GroupIndex.from_values(
            random.integers(3, size=100), random.choice(["a", "b", "c"], 100, p=[0.7, 0.2, 0.1])
        )
        chosen = Boosting(groups="group", seed=seed).samples(index)
        times = np.bincount(chosen, minlength=100)
        assert times.min() >= 1
        largest = index.counts.max(1, keepdim=True).values
        assert torch.equal(index.part(chosen).counts, torch.where(index.counts > 0, largest, 0))
        for cell in range(9):
            within = times[index.cells == cell]
            assert not len(within) or within.max() - within.min() <= 1

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
        """Of two labels the second is the positive one, unless the criterion is an object that says otherwise."""
        for criterion, positive in (("equal_opportunity", 1), (EqualOpportunity(positive_label=0), 0)):
            toy, cutting = Toy(), Cutting(criterion, groups="group")
            trainer(cutting, max_epochs=1).fit(ToyModule(), loader(toy))
            assert torch.equal(cutting.counts[1 - positive], cells(toy)[1 - positive])
            assert len(set(cutting.counts[positive].tolist())) == 1

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
        criterion = EqualOpportunity(positive_label=1)
        with pytest.raises(ValueError, match=r"`positive_label` to be one of the data's labels \[0, 2\] but got 1"):
            trainer(Cutting(criterion, groups="group")).fit(ToyModule(num_labels=3), loader(toy))

    def test_bad_input(self):
        with pytest.raises(ValueError, match="Found no groups in Toy"):
            trainer(Cutting(groups="rce")).fit(ToyModule(), loader())

    def test_training_can_go_on_after_an_error(self):
        run = trainer(Cutting(groups="nowhere"))
        with pytest.raises(ValueError, match="Found no groups"):
            run.fit(ToyModule(), loader())
        assert "dataloader" not in vars(run.fit_loop._data_source)


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
