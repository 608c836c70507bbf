"""Group DRO, against the published algorithm."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from baseline_methods import Replayed
from helpers import loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from fairbatch_lightning import FairSampler, GroupIndex
from fairbatch_lightning.batches.train_loader import TrainLoader
from fairbatch_lightning.callbacks.base import LoadedData
from fairbatch_lightning.callbacks.baselines import GroupDRO


def test_steps_are_those_of_the_published_algorithm():
    module, callback = Replayed(), GroupDRO(groups="group", step_size=0.3)
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


def in_batches_of(batch_size, index, num_replicas=1):
    """Return what a callback is told about its data, without a Trainer."""
    processes = None if num_replicas == 1 else {"num_replicas": num_replicas, "rank": 0}
    loader = TrainLoader.find(DataLoader(range(len(index)), batch_size=batch_size))
    trainer = SimpleNamespace(distributed_sampler_kwargs=processes)
    return LoadedData(trainer, torch.nn.Linear(1, 1), loader, index, same_samples=False)


def test_rare_cells_count_like_others():
    """Of four cells with constant losses a rare one is the worst: it gets the largest weight."""
    callback = GroupDRO(groups="group", step_size=0.01)
    counts = [100, 48, 48, 4]
    index = GroupIndex.from_values(np.repeat([0, 0, 1, 1], counts), np.repeat([0, 1, 0, 1], counts))
    callback.start(in_batches_of(20, index))
    sampler = FairSampler.from_index(index, 20)
    losses = torch.tensor([1.0, 1.0, 1.0, 3.0])
    for _ in range(20):
        for batch in sampler.batches():
            cells = torch.from_numpy(index.cells[batch].astype(np.int64))
            callback.loss_term(None, losses[cells], cells)
    assert callback.weights.flatten().argmax() == 3
    expected = torch.softmax(0.01 * 200 * losses, 0)
    torch.testing.assert_close(callback.weights.flatten(), expected, atol=0.05, rtol=0.05)


def test_batches_of_all_processes_count_as_one():
    """Two processes of ten samples each have a rare cell as often in their batches as one with twenty."""
    index = GroupIndex.from_values([0] * 30 + [1] * 170, ["a", "b"] * 100)
    weights = []
    for data in (in_batches_of(20, index), in_batches_of(10, index, num_replicas=2), in_batches_of(10, index)):
        callback = GroupDRO(groups="group", step_size=0.5)
        callback.start(data)
        callback.loss_term(None, torch.ones(3), torch.tensor([0, 1, 3]))
        weights.append(callback.weights)
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_empty_cells_have_no_weight():
    callback = GroupDRO(groups="group")
    assert callback.weights is None
    callback.start(in_batches_of(4, GroupIndex.from_values([0, 0, 1, 1], ["a", "b", "a", "a"])))
    assert callback.weights.tolist() == [[pytest.approx(1 / 3)] * 2, [pytest.approx(1 / 3), 0]]
    callback.loss_term(None, torch.tensor([1.0, 2.0]), torch.tensor([0, 2]))
    assert callback.weights[1, 1] == 0
    assert float(callback.weights.sum()) == pytest.approx(1)


def test_bad_input():
    with pytest.raises(ValueError, match="`step_size` to be a number above 0 but got 0"):
        GroupDRO(groups="group", step_size=0)
