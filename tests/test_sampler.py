"""The sampler's promises, each against a count of what it drew."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fairbatch_lightning import FairSampler
from fairbatch_lightning.loaders import FairBatchSampler


def data(sizes, seed=0):
    """Return labels and groups, shuffled, with the given number of samples per cell."""
    sizes = torch.tensor(sizes)
    cells = torch.arange(sizes.numel()).repeat_interleave(sizes.flatten())
    cells = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))]
    return cells // sizes.shape[1], cells % sizes.shape[1]


def random_shares(labels, groups, seed=0):
    counts = torch.zeros(int(labels.max()) + 1, int(groups.max()) + 1)
    counts.index_put_((labels, groups), torch.ones(len(labels)), accumulate=True)
    shares = torch.rand(counts.shape, generator=torch.Generator().manual_seed(seed)) ** 3 * (counts > 0)
    return shares.double() / shares.double().sum(1, keepdim=True)


def batches(sampler):
    drawn = list(sampler)
    return torch.tensor(drawn).view(-1, sampler.batch_size)


SIZES = {
    "binary": [[40, 160], [250, 50]],
    "one sample in a cell": [[1, 99], [60, 40]],
    "20 cells": [[100 + 13 * y + 29 * z for z in range(5)] for y in range(4)],
    "empty cell": [[30, 0, 50], [20, 40, 60]],
    "one group": [[70], [130]],
    "one label": [[70, 130]],
    "100 cells": [[7 + y for z in range(10)] for y in range(10)],
}


@pytest.fixture(params=SIZES, ids=str)
def cells(request):
    return data(SIZES[request.param])


@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_every_batch_and_the_epoch_hold_what_the_shares_say(cells, batch_size):
    """Each quota, and each cell's total over an epoch, is the expected number rounded up or down."""
    labels, groups = cells
    for epoch in range(5):
        shares = random_shares(labels, groups, seed=epoch)
        sampler = FairSampler(labels, groups, batch_size, shares=shares)
        sampler.set_epoch(epoch)
        drawn = batches(sampler)
        assert drawn.shape == (len(labels) // batch_size, batch_size)
        mass = torch.bincount(labels).double() / len(labels)
        for y, z in itertools.product(range(shares.shape[0]), range(shares.shape[1])):
            hits = (labels[drawn] == y) & (groups[drawn] == z)
            p = float(mass[y] * shares[y, z])
            assert (hits.sum(1) - p * batch_size).abs().max() < 1 + 1e-9
            assert abs(float(hits.sum()) - p * drawn.numel()) < 1 + 1e-6


def test_totals_stay_close_after_any_number_of_batches():
    labels, groups = data(SIZES["20 cells"])
    shares = random_shares(labels, groups)
    sampler = FairSampler(labels, groups, 32, shares=shares)
    mass = (torch.bincount(labels).double() / len(labels)).unsqueeze(1) * shares
    for epoch in range(20):
        sampler.set_epoch(epoch)
        drawn = batches(sampler)
        cell_of = labels[drawn] * 5 + groups[drawn]
        counts = torch.nn.functional.one_hot(cell_of, 20).sum(1).cumsum(0)
        expected = mass.flatten() * 32 * torch.arange(1, len(drawn) + 1).unsqueeze(1)
        assert (counts - expected).abs().max() < 3


def test_start_is_an_ordinary_shuffled_epoch(cells):
    labels, groups = cells
    sampler = FairSampler(labels, groups, 1)
    assert sorted(sampler) == list(range(len(labels)))


def test_no_sample_repeats_before_its_whole_cell_was_drawn(cells):
    labels, groups = cells
    sampler = FairSampler(labels, groups, 10, shares=random_shares(labels, groups, seed=3))
    walks = {}
    for i in sampler:
        walks.setdefault((int(labels[i]), int(groups[i])), []).append(i)
    for (y, z), walk in walks.items():
        size = int(((labels == y) & (groups == z)).sum())
        # Within a batch the order is shuffled, so compare how often samples were drawn, after every draw.
        times = np.bincount(walk, minlength=len(labels))[((labels == y) & (groups == z)).numpy()]
        assert times.max() - times.min() <= 1
        assert times.sum() == len(walk)
        assert len(set(walk)) == min(size, len(walk))


def test_small_cell_walks_through_permutation_after_permutation():
    """A cell of 3 that fills every batch of 1: three batches hold all of its samples, whatever the epoch."""
    sampler = FairSampler([0, 0, 0, 0], ["a", "a", "a", "b"], 1, shares=torch.tensor([[1.0, 0.0]]))
    for epoch in range(50):
        sampler.set_epoch(epoch)
        assert sorted(list(sampler)[:3]) == [0, 1, 2]


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_ranks_partition_the_stream_of_one_process(cells, num_replicas):
    labels, groups = cells
    shares = random_shares(labels, groups)
    ranks = [
        FairSampler(labels, groups, 4, shares=shares, num_replicas=num_replicas, rank=rank, seed=5)
        for rank in range(num_replicas)
    ]
    # One process must have as many batches, so that the streams are comparable.
    one = FairSampler(
        labels, groups, 4 * num_replicas, shares=shares, seed=5, drop_last=len(labels) % num_replicas == 0
    )
    parts = [torch.tensor(list(rank)).view(-1, 4) for rank in ranks]
    if one.num_batches == ranks[0].num_batches:
        for number, batch in enumerate(torch.tensor(list(one)).view(-1, 4 * num_replicas)):
            assert torch.equal(torch.stack([part[number] for part in parts], 1).flatten(), batch)
    assert len({len(part) for part in parts}) == 1


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


def test_new_shares_hold_from_the_next_batch_on():
    labels, groups = data(SIZES["binary"])
    sampler = FairSampler(labels, groups, 10)
    stream = sampler.batches()
    before = [next(stream) for _ in range(7)]
    sampler.shares = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    after = list(stream)
    assert {(int(labels[i]), int(groups[i])) for batch in before for i in batch} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {(int(labels[i]), int(groups[i])) for batch in after for i in batch} == {(0, 0), (1, 1)}
    assert len(before) + len(after) == sampler.num_batches


def test_changed_shares_go_on_with_the_cells_walks():
    """No sample repeats before its whole cell was drawn, over a change of shares as well."""
    labels, groups = data([[30, 30], [30, 30]])
    sampler = FairSampler(labels, groups, 6)
    drawn = []
    for number, batch in enumerate(sampler.batches()):
        drawn += batch
        if number % 3 == 2:
            sampler.shares = random_shares(labels, groups, seed=number)
    for y, z in itertools.product(range(2), range(2)):
        times = np.bincount(drawn, minlength=120)[((labels == y) & (groups == z)).numpy()]
        assert times.max() - times.min() <= 1


@pytest.mark.parametrize("stop", [0, 1, 9, 49])
def test_state_continues_the_stream(stop):
    labels, groups = data(SIZES["binary"])

    def play(sampler, first, last, out):
        stream = sampler.batches()
        for number in range(first, last):
            if number in (3, 20):
                sampler.shares = random_shares(labels, groups, seed=number)
            out.append(next(stream))
        return stream

    whole, resumed = [], []
    play(FairSampler(labels, groups, 10), 0, 50, whole)
    interrupted = FairSampler(labels, groups, 10)
    stream = play(interrupted, 0, stop, resumed)
    state = interrupted.state_dict()
    del stream
    fresh = FairSampler(labels, groups, 10)
    fresh.load_state_dict(state)
    fresh.set_epoch(0)  # as Lightning does
    play(fresh, stop, 50, resumed)
    assert resumed == whole


def test_state_of_a_batch_that_was_drawn_but_not_used():
    """Worker processes fetch ahead; what they fetched by other shares is drawn again by those."""
    labels, groups = data(SIZES["binary"])
    sampler = FairSampler(labels, groups, 10)
    stream = sampler.batches()
    drawn = [next(stream) for _ in range(8)]
    sampler.shares = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    state = sampler.state_dict(next_batch=5)
    drawn += list(stream)
    fresh = FairSampler(labels, groups, 10)
    fresh.load_state_dict(state)
    assert list(fresh.batches()) == drawn[5:]


def test_state_with_another_number_of_processes_continues_at_the_next_epoch():
    labels, groups = data(SIZES["binary"])
    sampler = FairSampler(labels, groups, 10)
    sampler.set_epoch(4)
    stream = sampler.batches()
    next(stream)
    sampler.shares = random_shares(labels, groups)
    fresh = FairSampler(labels, groups, 10, num_replicas=2, rank=0)
    fresh.load_state_dict(sampler.state_dict())
    assert fresh.epoch == 5
    assert torch.equal(fresh.shares, sampler.shares)


def test_is_what_the_readme_says_for_plain_pytorch():
    dataset = TensorDataset(torch.arange(100.0), torch.arange(100) % 2)
    groups = ["a" if i % 3 else "b" for i in range(100)]
    sampler = FairSampler(dataset.tensors[1], groups, batch_size=10)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, drop_last=True, num_workers=2)
    seen = torch.cat([x for x, _ in loader])
    assert sorted(seen.tolist()) == list(range(100))
    sampler.shares = [[1, 0], [0, 1]]
    assert all(len(x) == 10 for x, _ in loader)


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


class SamplerMachine(RuleBasedStateMachine):
    """Any order of drawing, setting shares, saving, loading and setting the epoch keeps the sampler's promises.

    A twin is told only what matters, the epoch and the shares of every batch, and draws the epoch anew in one go.
    """

    @initialize(sizes=st.lists(st.integers(0, 30), min_size=6, max_size=6), batch_size=st.integers(1, 9))
    def start(self, sizes, batch_size):
        sizes = [max(size, least) for size, least in zip(sizes, (9, 1, 1, 9, 0, 0), strict=True)]  # all groups occur
        self.labels, self.groups = data([sizes[:3], sizes[3:]])
        self.batch_size = batch_size
        self.sampler = self.new()
        self.shares = self.sampler.shares
        self.begin(0)
        self.saved = None

    def new(self):
        return FairSampler(self.labels, self.groups, self.batch_size)

    def begin(self, epoch):
        self.epoch, self.drawn, self.plan, self.stream = epoch, [], [], None

    @rule(count=st.integers(1, 12))
    def draw(self, count):
        if self.stream is None:
            self.stream = self.sampler.batches()
        for batch in itertools.islice(self.stream, count):
            self.drawn.append(batch)
            self.plan.append(self.shares)

    @rule(seed=st.integers(0, 5))
    def set_shares(self, seed):
        self.shares = random_shares(self.labels, self.groups, seed)
        self.sampler.shares = self.shares

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        finished = self.stream is not None and len(self.drawn) == self.sampler.num_batches
        self.sampler.set_epoch(epoch)
        if epoch != self.epoch or finished:
            self.begin(epoch)

    @rule()
    def save(self):
        self.saved = self.sampler.state_dict(), self.epoch, list(self.drawn), list(self.plan), self.shares

    @precondition(lambda self: self.saved)
    @rule()
    def load(self):
        state, self.epoch, drawn, plan, self.shares = self.saved
        self.sampler = self.new()
        self.sampler.load_state_dict(state)
        self.drawn, self.plan, self.stream = list(drawn), list(plan), None

    @invariant()
    def batches_are_those_of_the_twin(self):
        twin = self.new()
        twin.set_epoch(self.epoch)
        stream = twin.batches()
        for batch, shares in zip(self.drawn, self.plan, strict=True):
            if not torch.equal(twin.shares, shares):
                twin.shares = shares
            assert next(stream) == batch

    @invariant()
    def batches_are_full_and_cells_are_walked_evenly(self):
        assert all(len(batch) == self.batch_size for batch in self.drawn)
        assert len(self.drawn) <= self.sampler.num_batches
        times = np.bincount(list(itertools.chain(*self.drawn)), minlength=len(self.labels))
        cells = (self.labels * 3 + self.groups).numpy()
        for cell in np.unique(cells):
            assert np.ptp(times[cells == cell]) <= 1


SamplerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSamplerMachine = SamplerMachine.TestCase


@pytest.mark.parametrize("num_groups", [2, 256, 257])
@pytest.mark.parametrize("rank", [0, 2])
def test_batches_come_with_their_cells(num_groups, rank, monkeypatch):
    """And whatever is done to these changes no later batch."""
    monkeypatch.setattr("fairbatch_lightning.sampler._DRAWS_AT_ONCE", 50)
    labels, groups = data([[600 // num_groups] * num_groups])
    samplers = [FairSampler(labels, groups, 7, num_replicas=3, rank=rank) for _ in range(2)]
    for spoiled, batch in zip(samplers[0].batches_with_cells(), samplers[1].batches(), strict=True):
        assert spoiled.samples == batch
        assert spoiled.cells.tolist() == groups[batch].tolist()
        spoiled.cells[:] = 0
