"""The sampler's promises about epochs, processes and random numbers."""

import random

import numpy as np
import pytest
import torch
from cell_data import SIZES, batches, data, random_shares, some_weights, weighted_data
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fairbatch_lightning import FairSampler, GroupIndex
from fairbatch_lightning.batches.delivery import FairBatchSampler


@pytest.fixture(params=SIZES, ids=str)
def cells(request):
    return data(SIZES[request.param])


def test_start_is_an_ordinary_shuffled_epoch(cells):
    labels, groups = cells
    sampler = FairSampler(labels, groups, 1)
    assert sorted(sampler) == list(range(len(labels)))


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_ranks_partition_the_stream_of_one_process(cells, num_replicas):
    """One process that draws as many batches, each as large as those of all processes together."""
    index, settings = GroupIndex.from_values(*cells), {"shares": random_shares(*cells), "seed": 5}
    ranks = [
        FairSampler.from_index(index, 4, num_replicas=num_replicas, rank=rank, **settings)
        for rank in range(num_replicas)
    ]
    number = ranks[0].num_batches
    one = FairSampler.from_index(index, 4 * num_replicas, epoch_size=number * 4 * num_replicas, **settings)
    together = torch.stack([batches(rank) for rank in ranks], 2).view(number, -1)
    assert torch.equal(together, batches(one))


@pytest.mark.parametrize("num_samples", [99, 100, 101, 127, 128])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_epoch_is_as_long_as_torchs_own(num_samples, drop_last, num_replicas):
    dataset = TensorDataset(torch.arange(num_samples))
    torchs = DistributedSampler(dataset, num_replicas=num_replicas, rank=0)
    expected = len(DataLoader(dataset, batch_size=16, sampler=torchs, drop_last=drop_last))
    groups = torch.arange(num_samples) % 2
    sampler = FairSampler(groups, groups, 16, num_replicas=num_replicas, rank=0, drop_last=drop_last)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=drop_last)
    assert len(loader) == len(list(loader)) == len(FairBatchSampler(sampler)) == expected
    assert all(len(batch[0]) == 16 for batch in loader)


def test_same_seed_same_stream_other_seed_or_epoch_another(cells):
    labels, groups = cells

    def stream(seed, epoch):
        sampler = FairSampler(labels, groups, 8, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert stream(0, 0) == stream(0, 0)
    assert stream(0, 0) != stream(0, 1)
    assert stream(0, 0) != stream(1, 0)
    assert stream(0, 1) != stream(1, 0)


def test_each_pass_is_a_new_epoch_and_set_epoch_chooses():
    labels, groups = data(SIZES["binary"])
    sampler = FairSampler(labels, groups, 8)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_set_epoch_after_iter_does_not_disturb_the_pass():
    """Lightning calls iter() before it says which epoch it is; worker processes have drawn by then."""
    labels, groups = data(SIZES["binary"])
    expected = list(FairSampler(labels, groups, 8))
    sampler = FairSampler(labels, groups, 8)
    stream = iter(sampler)
    started = [next(stream) for _ in range(20)]
    sampler.set_epoch(0)
    assert started + list(stream) == expected


def test_set_epoch_after_the_last_batch_starts_anew():
    """A loop that counts batches never asks for one more, so the pass does not end by itself."""
    labels, groups = data(SIZES["binary"])
    sampler = FairSampler(labels, groups, 10)
    stream = sampler.batches()
    first = [next(stream) for _ in range(50)]
    sampler.set_epoch(0)
    again = sampler.batches()
    assert [next(again) for _ in range(50)] == first


def test_two_passes_at_once_do_not_disturb_each_other():
    labels, groups = data(SIZES["binary"])
    apart = FairSampler(labels, groups, 8)
    expected = list(zip(list(apart), list(apart), strict=True))
    together = FairSampler(labels, groups, 8)
    assert list(zip(together, together, strict=True)) == expected


def test_global_random_numbers_are_untouched(cells):
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    list(FairSampler(*cells, 8))
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


def test_is_what_the_readme_says_for_plain_pytorch():
    dataset = TensorDataset(torch.arange(100.0), torch.arange(100) % 2)
    groups = ["a" if i % 3 else "b" for i in range(100)]
    sampler = FairSampler(dataset.tensors[1], groups, batch_size=10)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, drop_last=True, num_workers=2)
    seen = torch.cat([x for x, _ in loader])
    assert sorted(seen.tolist()) == list(range(100))
    sampler.shares = [[1, 0], [0, 1]]
    assert all(len(x) == 10 for x, _ in loader)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("samples", "processes"), [(239, 1), (239, 2), (240, 2), (241, 3), (40, 2)])
def test_an_epoch_is_as_long_as_that_of_torchs_own_sampler(samples, processes, drop_last):
    """With drop_last, 239 samples are 11 batches of 20 on one process, but 12 on two with batches of 10."""
    dataset = TensorDataset(torch.zeros(samples))
    theirs = DataLoader(
        dataset, 20 // processes, sampler=DistributedSampler(dataset, processes, rank=0), drop_last=drop_last
    )
    labels = torch.arange(samples) % 2
    ours = FairSampler(labels, labels, 20 // processes, num_replicas=processes, rank=0, drop_last=drop_last)
    assert ours.num_batches == len(theirs)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_processes_are_one_with_larger_batches(samples, batch_size, processes, drop_last):
    """But if a few samples are missing for a batch that would be dropped: torch's own sampler repeats some there."""
    index = GroupIndex.from_values(torch.arange(samples) % 2, torch.arange(samples) % 3)
    together = batch_size * processes
    missing = -samples % together
    assume(samples >= together or not drop_last)
    one = FairSampler.from_index(index, together, num_replicas=1, rank=0, drop_last=drop_last)
    ranks = [
        FairSampler.from_index(index, batch_size, num_replicas=processes, rank=rank, drop_last=drop_last)
        for rank in range(processes)
    ]
    longer = drop_last and 0 < missing < processes
    assert {rank.num_batches - one.num_batches for rank in ranks} == {int(longer)}
    if not longer:
        streams = [batches(rank) for rank in ranks]
        assert torch.equal(torch.stack(streams, 2).view(one.num_batches, -1), batches(one))


def test_an_epoch_of_another_length():
    labels, groups = data(SIZES["binary"])
    index = GroupIndex.from_values(labels, groups)
    assert len(batches(FairSampler.from_index(index, 10, epoch_size=60))) == 6
    assert len(batches(FairSampler.from_index(index, 10, epoch_size=1005, drop_last=False))) == 101


def test_shares_and_weights_are_copies():
    sampler = FairSampler([0, 0, 0], ["a", "a", "b"], 1, weights=[1.0, 2.0, 1.0])
    before = list(sampler)
    sampler.set_epoch(0)
    sampler.shares.zero_()
    sampler.weights[:] = 0
    assert list(sampler) == before


def test_equal_weights_are_none():
    sampler = FairSampler([0, 0, 0], ["a", "a", "b"], 1, weights=[2.0, 2.0, 2.0])
    assert sampler.weights is None
    assert not sampler.weighted
    sampler.weights = [1.0, 2.0, 1.0]
    assert sampler.weighted
    sampler.weights = None
    assert not sampler.weighted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` to be a positive integer but got 0"),
        ({"batch_size": None}, "`batch_size` to be a positive integer but got None"),
        ({"batch_size": 7}, "6 samples on 1 process.* do not fill a batch of 7.*drop_last=False"),
        ({"seed": -1}, "`seed` to be an integer of at least 0 but got -1"),
        ({"rank": 2, "num_replicas": 2}, "`rank` to be between 0 and num_replicas - 1 = 1 but got 2"),
        ({"groups": [0, 1]}, "one label and one group per sample but got 6 labels and 2 groups"),
        ({"groups": [0.5, 1, 0, 1, 0, 1]}, "numbers such as 0.5"),
        ({"shares": [[0.5, 0.5]]}, r"`shares` of shape \(2, 2\) \(labels, groups\) but got \(1, 2\)"),
        ({"shares": [[0.5, 0.6], [1, 0]]}, "sum to 1 but got"),
        ({"shares": [[-0.5, 1.5], [1, 0]]}, "sum to 1 but got"),
        ({"shares": [[float("nan"), 1], [1, 0]]}, "sum to 1 but got"),
        ({"shares": [[0.5, 0.5], [0.5, 0.5]]}, r"share 0 for cells without samples .* \(label 1, group 1\)"),
        ({"labels": [], "groups": []}, "at least one sample but got none: the dataset is empty"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    arguments = {"labels": [0, 0, 0, 1, 1, 1], "groups": [0, 1, 0, 0, 0, 0], "batch_size": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        FairSampler(**arguments)


class TestWeights:
    def test_processes_share_out_the_stream_of_one(self):
        labels, groups = weighted_data()
        weights = some_weights(len(labels))
        alone = batches(FairSampler(labels, groups, 20, weights=weights)).numpy()
        parts = [
            batches(FairSampler(labels, groups, 10, weights=weights, num_replicas=2, rank=rank)).numpy()
            for rank in (0, 1)
        ]
        assert (np.stack(parts, 2).reshape(alone.shape) == alone).all()

    def test_takes_tensors(self):
        labels, groups = weighted_data()
        weights = torch.tensor(some_weights(len(labels)))
        sampler = FairSampler(labels, groups, 20, weights=weights)
        weights.zero_()
        assert (sampler.weights == some_weights(len(labels))).all()


@pytest.mark.parametrize("num_groups", [2, 256, 257])
@pytest.mark.parametrize("rank", [0, 2])
def test_batches_come_with_their_cells(num_groups, rank, monkeypatch):
    """And whatever is done to these changes no later batch."""
    monkeypatch.setattr("fairbatch_lightning.batches.sampler._DRAWS_AT_ONCE", 50)
    labels, groups = data([[600 // num_groups] * num_groups])
    samplers = [FairSampler(labels, groups, 7, num_replicas=3, rank=rank) for _ in range(2)]
    for spoiled, batch in zip(samplers[0].batches_with_cells(), samplers[1].batches(), strict=True):
        assert spoiled.samples == batch
        assert spoiled.cells.tolist() == groups[batch].tolist()
        spoiled.cells[:] = 0
