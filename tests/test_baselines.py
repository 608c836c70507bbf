"""What FairBatch is compared with."""

import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fairbatch_lightning.baselines import Cutting, evened
from fairbatch_lightning.groups import GroupIndex


def cells(toy):
    return torch.bincount(toy.targets * 3 + toy.group_ids, minlength=6).view(2, 3)


class OnFirst(ToyModule):
    """Trains on the first of several loaders."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


def trained_on(module):
    return torch.tensor([index for batch in module.batches for index in batch])


class TestEvened:
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
        kept = evened(GroupIndex.from_values(labels, groups), criterion, 1 if "opp" in criterion else None, random)
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
        assert evened(index, "equalized_odds", None, np.random.default_rng(0)).tolist() == [0, 1, 2, 3]


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
        kept = evened(GroupIndex.from_dataset(toy, groups="group"), "equalized_odds", None, np.random.default_rng(0))
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

    def test_bad_input(self):
        with pytest.raises(ValueError, match=r"one of .*equalized_odds.* but got 'fair'"):
            Cutting("fair")
        with pytest.raises(ValueError, match="Found no groups in Toy"):
            trainer(Cutting(groups="rce")).fit(ToyModule(), loader())

    def test_training_can_go_on_after_an_error(self):
        run = trainer(Cutting(groups="nowhere"))
        with pytest.raises(ValueError, match="Found no groups"):
            run.fit(ToyModule(), loader())
        assert "dataloader" not in vars(run.fit_loop._data_source)
