"""Reweighing, and sampling by the same weights."""

import pytest
import torch
from baseline_methods import Replayed
from by_hand import cells, trained_on
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.callbacks.baselines import Resampling, Reweighing
from fairbatch_lightning.callbacks.baselines.reweighing import independence_weights


def test_steps_are_those_of_the_weighted_loss():
    toy, module = Toy(), Replayed()
    trainer(Reweighing(groups="group"), max_epochs=1).fit(module, loader(toy))
    counts = cells(toy)

    def weighted(logits, y, z):
        weights = [
            float((toy.targets == a).sum() * (toy.group_ids == b).sum() / 240 / counts[a, b])
            for a, b in zip(y.tolist(), z.tolist(), strict=True)
        ]
        return (torch.tensor(weights) * functional.cross_entropy(logits, y, reduction="none")).mean()

    module.replay(weighted)


def test_sampling_makes_labels_and_groups_independent():
    toy, module = Toy(), ToyModule()
    trainer(Resampling(groups="group"), max_epochs=5).fit(module, loader(toy))
    drawn = trained_on(module)
    table = torch.bincount(toy.targets[drawn] * 3 + toy.group_ids[drawn], minlength=6).view(2, 3) / len(drawn)
    expected = torch.bincount(toy.targets)[:, None] / 240 * torch.bincount(toy.group_ids) / 240
    torch.testing.assert_close(table, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_weighted_counts_are_independent_and_as_many(seed):
    counts = torch.randint(1, 50, (3, 4), generator=torch.Generator().manual_seed(seed))
    weighted = counts * independence_weights(counts)
    torch.testing.assert_close(weighted.sum(1), counts.sum(1).double())
    torch.testing.assert_close(weighted.sum(0), counts.sum(0).double())
    torch.testing.assert_close(weighted, weighted.sum(1, keepdim=True) * weighted.sum(0) / counts.sum())


def test_empty_cells_have_no_weight_and_no_share():
    index = GroupIndex.from_values([0, 0, 0, 1, 1], ["a", "a", "b", "a", "a"])
    assert independence_weights(index.counts)[1].tolist() == [pytest.approx(0.8), 0]
    shares = Resampling(groups="group").shares_of(index)
    torch.testing.assert_close(shares, torch.tensor([[0.8, 0.2], [1, 0]]).double())


def test_weights_are_known_once_the_data_is():
    callback = Reweighing(groups="group")
    assert callback.weights is None
    trainer(callback, max_epochs=1).fit(ToyModule(), loader())
    assert torch.equal(callback.weights, independence_weights(cells(Toy())))
