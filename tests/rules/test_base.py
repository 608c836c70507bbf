"""Rules are functions: what they remember is in the state, which checkpoints hold."""

import dataclasses
import io

import pytest
import torch
from helpers import measurement

from fairbatch_lightning import Adaptive, RuleState, SignedSteps, UpdateRule, WorstCase

COUNTS = torch.tensor([[30, 10, 5], [20, 20, 0]])
SIGNAL = torch.tensor([[0.2, 0.6, 0.4], [0.5, 0.1, torch.nan]], dtype=torch.float64)
MEASURED = measurement(SIGNAL, COUNTS)


class Momentum(UpdateRule):
    """Remembers the last signal."""

    def update(self, state, measured):
        signal = measured.signal
        last = state.memory.get("last", torch.zeros_like(signal))
        wanted = (signal + last).nan_to_num(0)
        return state.after((state.shares + wanted / wanted.sum(1, keepdim=True)) / 2, last=signal.nan_to_num(0))


RULES = {
    "signed steps": SignedSteps(alpha=0.1),
    "pulled": SignedSteps(alpha=0.1, pull=2.0, min_share=0.05),
    "neighbours": SignedSteps(alpha=lambda update: 0.1 / (update + 1), compare="neighbours"),
    "worst case": WorstCase(alpha=0.3),
    "adaptive": Adaptive(),
    "adaptive, tolerant": Adaptive(tolerance=0.05),
    "with a memory": Momentum(),
}


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


def copied(state):
    return dataclasses.replace(
        state, shares=state.shares.clone(), memory={name: value.clone() for name, value in state.memory.items()}
    )


def assert_same(one, other):
    assert one.updates == other.updates
    assert torch.equal(one.shares, other.shares)
    assert set(one.memory) == set(other.memory)
    assert all(torch.equal(one.memory[name], other.memory[name]) for name in one.memory)


class TestEveryRule:
    def test_an_update_changes_nothing_that_it_is_given(self, rule):
        counts, signal = COUNTS.clone(), SIGNAL.clone()
        measured = measurement(signal, counts)
        state = rule.update(rule.start(counts), measured)
        before = copied(state)
        after = rule.update(state, measured)
        assert not torch.equal(after.shares, before.shares)
        assert_same(state, before)
        assert torch.equal(counts, COUNTS)
        assert torch.equal(signal.nan_to_num(-1), SIGNAL.nan_to_num(-1))

    def test_the_same_state_and_signal_give_the_same_shares(self, rule):
        state = rule.update(rule.start(COUNTS), MEASURED)
        assert_same(rule.update(state, MEASURED), rule.update(state, MEASURED))

    def test_updates_are_counted(self, rule):
        state = rule.start(COUNTS)
        assert state.updates == 0
        for number in range(1, 4):
            state = rule.update(state, MEASURED)
            assert state.updates == number

    def test_shares_of_empty_cells_stay_0_and_rows_sum_to_1(self, rule):
        state = rule.start(COUNTS)
        for _ in range(5):
            assert state.shares[1, 2] == 0
            torch.testing.assert_close(state.shares.sum(1), torch.ones(2).double())
            state = rule.update(state, MEASURED)

    def test_a_saved_state_goes_on_as_if_nothing_had_happened(self, rule):
        state = rule.update(rule.start(COUNTS), MEASURED)
        restored = rule.start(COUNTS).load(state.state_dict())
        for _ in range(3):
            state, restored = (rule.update(one, MEASURED) for one in (state, restored))
            assert_same(state, restored)


class TestRuleState:
    def test_survives_a_checkpoint(self):
        """As plain data, which is all that a checkpoint may hold."""
        state = RuleState(torch.rand(2, 3).double(), 7, {"last": torch.rand(2)})
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        restored = RuleState(torch.zeros(2, 3).double()).load(torch.load(file, weights_only=True))
        assert_same(restored, state)

    def test_a_saved_state_is_a_copy_and_so_is_a_loaded_one(self):
        state = RuleState(torch.ones(1, 2))
        saved = state.state_dict()
        restored = state.load(saved)
        saved["shares"].zero_()
        saved["memory"]["more"] = torch.ones(1)
        assert torch.equal(state.shares, torch.ones(1, 2))
        assert torch.equal(restored.shares, torch.ones(1, 2))
        assert not state.memory
        assert not restored.memory

    def test_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            RuleState(torch.ones(1, 2)).updates = 3

    def test_memory_is_what_the_last_update_gave(self):
        state = RuleState(torch.ones(1, 2)).after(torch.ones(1, 2), a=torch.ones(1)).after(torch.ones(1, 2))
        assert state.updates == 2
        assert not state.memory

    def test_shares_of_other_cells_are_refused(self):
        saved = RuleState(torch.ones(2, 3)).state_dict()
        with pytest.raises(ValueError, match=r"`shares` .* shape \(2, 2\), at least 0 but got .* shape \(2, 3\)"):
            RuleState(torch.ones(2, 2)).load(saved)


class TestUpdateRule:
    def test_starts_at_the_shares_of_the_data(self):
        assert Momentum().start(COUNTS).shares.tolist() == [[30 / 45, 10 / 45, 5 / 45], [0.5, 0.5, 0]]

    def test_gaps_follow_its_comparison(self):
        class Neighbours(Momentum):
            compare = "neighbours"

        measured = measurement(torch.tensor([[0.1, 0.4, 0.9], [0.2, torch.nan, torch.nan]]), COUNTS)
        assert float(Momentum().gaps(measured)[0]) == pytest.approx(0.8)
        assert float(Neighbours().gaps(measured)[0]) == pytest.approx(0.5)
        assert Momentum().gaps(measured)[1].isnan()

    def test_needs_an_update(self):
        with pytest.raises(TypeError, match="abstract"):
            UpdateRule()
