"""Where a pass over an epoch stands: saved in the middle, it goes on as if nothing had happened."""

import itertools

import numpy as np
import pytest
import torch
from cell_data import SIZES, data, random_shares, some_weights, weighted_data
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import DataLoader

from fairbatch_lightning import FairSampler, GroupIndex
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.batches.delivery import FairBatchSampler, with_batches
from fairbatch_lightning.batches.epoch import Pass, Plan, check_shares, check_weights


def from_state(state):
    """Return a pass over three samples of one cell."""
    return Pass.from_state(Saved({**state, "num_batches": 5}), GroupIndex.from_values([0, 0, 0], [0, 0, 0]))


class TestPass:
    def test_batches_follow_the_plan_of_their_time(self):
        one, two, three = (torch.full((1, 1), float(number)) for number in range(3))
        current = Pass(0, [Plan(0, one)])
        current.next_batch = 4
        current.follow(two, None)
        current.next_batch = 6
        current.follow(three, None)
        for batch, shares in ((3, one), (4, two), (5, two), (6, three)):
            assert current.plan(batch).shares is shares
        assert [plan.first for plan in current.plans] == [0, 4, 6]

    def test_a_plan_that_no_batch_was_drawn_by_is_replaced(self):
        current = Pass(0, [Plan(0, torch.zeros(1, 1))], next_batch=4)
        for number in range(3):
            current.follow(torch.full((1, 1), float(number)), None)
        assert [plan.first for plan in current.plans] == [0, 4]
        assert float(current.plan(4).shares) == 2

    def test_a_state_holds_copies(self):
        shares, weights = torch.ones(1, 1), np.ones(3)
        current = Pass(2, [Plan(0, shares, weights)], next_batch=1)
        state = current.state_dict(None)
        again = from_state(state)
        shares.zero_()
        weights[:] = 0
        state["schedule"][0][1].zero_()
        state["weights"][0].zero_()
        assert (again.epoch, again.next_batch) == (2, 1)
        assert float(again.plan(0).shares) == 1
        assert again.plan(0).weights.tolist() == [1, 1, 1]

    def test_a_state_is_of_no_batch_that_was_not_drawn(self):
        assert Pass(0, [Plan(0, torch.ones(1, 1))], next_batch=3).state_dict(7)["next_batch"] == 3

    def test_a_state_without_weights_is_read(self):
        state = Pass(0, [Plan(0, torch.ones(1, 1))]).state_dict(None)
        del state["weights"]
        assert from_state(state).plan(0).weights is None


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


def test_shares_that_change_after_resuming_spare_what_was_drawn_ahead():
    """As in the run that was stopped: its worker processes had drawn three more batches."""
    labels, groups = data(SIZES["binary"])
    sampler, shares = FairSampler(labels, groups, 10), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    stream = sampler.batches()
    drawn = [next(stream) for _ in range(8)]
    state = sampler.state_dict(next_batch=5)
    sampler.shares = shares
    drawn += list(stream)
    fresh = FairSampler(labels, groups, 10)
    fresh.load_state_dict(state)
    fresh.shares = shares
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


class TestWeights:
    def test_new_weights_hold_from_the_next_batch_on(self):
        labels, groups = weighted_data()
        sampler, plain = FairSampler(labels, groups, 20), FairSampler(labels, groups, 20)
        stream, expected = sampler.batches(), plain.batches()
        assert [next(stream) for _ in range(3)] == [next(expected) for _ in range(3)]
        weights = np.zeros(len(labels))
        weights[-200:] = 1
        sampler.weights = weights
        assert min(min(batch) for batch in stream) >= len(labels) - 200

    @pytest.mark.parametrize("trained", [0, 4, 7, 12, 29])
    def test_state_continues_the_stream(self, trained):
        """Also where workers had fetched batches in advance, from before and after the weights changed."""
        labels, groups = weighted_data()

        def play(sampler, until):
            drawn, stream = [], sampler.batches()
            for number in range(until):
                if number in (5, 10):
                    sampler.weights = some_weights(len(labels), seed=number)
                drawn.append(next(stream))
            return drawn

        fetched = min(trained + 8, 30)
        sampler, resumed = (FairSampler(labels, groups, 20) for _ in range(2))
        drawn = play(sampler, fetched)
        resumed.load_state_dict(sampler.state_dict(trained))
        assert resumed.state_dict()["next_batch"] == trained
        assert list(itertools.islice(resumed.batches(), fetched - trained)) == drawn[trained:]

    def test_state_holds_no_more_weights_than_are_needed(self):
        labels, groups = weighted_data()
        sampler = FairSampler(labels, groups, 20)
        stream = sampler.batches()
        for number in range(10):
            sampler.weights = some_weights(len(labels), seed=number)
            next(stream)
        kept = [weights is not None for weights in sampler.state_dict(8)["weights"]]
        assert kept == [False] * 8 + [True] * 2

    @pytest.mark.parametrize(("num_workers", "most"), [(0, 1), pytest.param(2, 5, marks=pytest.mark.slow)])
    def test_weights_that_only_trained_batches_were_drawn_by_are_forgotten(self, num_workers, most):
        """Or memory would grow with every update within an epoch; and a state still continues the stream."""
        labels, groups = weighted_data()
        batches = FairBatchSampler(sampler := FairSampler(labels, groups, 20))
        loader = with_batches(DataLoader(range(600), 20, num_workers=num_workers), batches)
        trained = []
        for number, batch in enumerate(loader):
            trained.append(batch.tolist())
            batches.take()
            sampler.weights = some_weights(600, seed=number)
            assert sum(plan.weights is not None for plan in sampler._pass.plans) <= most
            state = sampler.state_dict(number + 1)
            if number == 19:
                resumed = FairSampler(labels, groups, 20)
                resumed.load_state_dict(state)
                drawn = sampler._pass.next_batch  # one more is drawn by the same weights
        assert len(trained) == 30
        assert list(itertools.islice(resumed.batches(), drawn + 1 - 20)) == trained[20 : drawn + 1]

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (np.ones(5), "of shape (600,)"),
            (np.full(600, -1.0), "numbers of at least 0"),
            (np.full(600, np.nan), "numbers of at least 0"),
            (np.zeros(600), "above 0 in every cell"),
        ],
    )
    def test_bad_weights_are_refused(self, weights, message):
        with pytest.raises(ValueError, match="weights") as error:
            FairSampler(*weighted_data(), 20, weights=weights)
        assert message in str(error.value)

    def test_a_state_with_weights_of_other_samples_is_refused(self):
        labels, groups = weighted_data()
        state = FairSampler(labels, groups, 20, weights=some_weights(len(labels))).state_dict()
        with pytest.raises(ValueError, match="one per sample"):
            FairSampler(*weighted_data(500), 20).load_state_dict(state)

    def test_the_cell_without_a_weight_is_named(self):
        index = GroupIndex.from_values([0, 0, 1], ["a", "b", "a"])
        with pytest.raises(ValueError, match=r"above 0 in every cell but got none in \(label 0, group b\)\."):
            check_weights(np.array([1.0, 0.0, 1.0]), index)
        check_weights(None, index)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([[0.5, 0.5]], r"`shares` of shape \(2, 2\) \(labels, groups\) but got \(1, 2\)"),
        ([[0.5, 0.6], [1, 0]], "sum to 1 but got"),
        ([[-0.5, 1.5], [1, 0]], "sum to 1 but got"),
        ([[float("nan"), 1], [1, 0]], "sum to 1 but got"),
        ([[0.5, 0.5], [0.5, 0.5]], r"share 0 for cells without samples .* \(label 1, group 1\)"),
    ],
)
def test_bad_shares_are_refused(shares, message):
    index = GroupIndex.from_values([0, 0, 1], [0, 1, 0])
    with pytest.raises(ValueError, match=message):
        check_shares(torch.tensor(shares, dtype=torch.float64), index)


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
