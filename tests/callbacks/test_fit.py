"""FairFit, where the loop closes: losses to the criterion, its signal to the rule, the shares to the sampler."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, measurement

from fairbatch_lightning import (
    Adaptive,
    CellLosses,
    EqualizedOdds,
    EqualOpportunity,
    Estimate,
    FairBatchWarning,
    FairSampler,
    GroupIndex,
    Importance,
    SignedSteps,
    TrainingRun,
)
from fairbatch_lightning.batches.sampler import Drawn
from fairbatch_lightning.batches.train_loader import TrainLoader
from fairbatch_lightning.callbacks.fit import FairFit
from fairbatch_lightning.measure.evidence import FIRST_BATCHES
from fairbatch_lightning.measure.logits import LogitsReader
from fairbatch_lightning.measure.per_sample import SampleLoss, cross_entropy

TOY = Toy()
INDEX = GroupIndex.from_dataset(TOY, groups="group")
LOSSES = torch.tensor([[0.5, 0.1, 0.3], [0.2, 0.4, 0.9]], dtype=torch.float64)


class Given(Estimate):
    """Measures what it is given, and keeps what it was asked and shown."""

    def __init__(self, losses=LOSSES, watches=False):
        self.losses, self.watches_training = losses, watches
        self.asked, self.observed, self.loaded = [], [], None

    def observe(self, run, logits, cells):
        self.observed.append((logits, cells))

    def measure(self, run, update, *, uniform):
        self.asked.append((update, uniform))
        return CellLosses(self.losses, run.index.counts)

    def state_dict(self, run, *, alone):
        return {"alone": alone}

    def load_state_dict(self, run, state):
        self.loaded = state


class Growing(Importance):
    """Weighs samples by their number, and keeps what it was told."""

    def __init__(self, told=None):
        self.told = [] if told is None else told

    def __deepcopy__(self, memo):
        """A fit works on a copy; what it is told is kept here as well."""
        return Growing(self.told)

    def weights(self, losses, index, update):
        self.told.append((losses, update))
        return np.arange(1.0, 1 + len(index))


class Plain(ToyModule):
    """Logs nothing: there is no Trainer."""

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


def new_fit(estimate=None, importance=None, criterion=None, module=None, epoch=0, rule=None):
    """Return a fit without a Trainer, in an epoch of twelve batches of twenty."""
    module, reader = Plain() if module is None else module, LogitsReader("FairBatch")
    reader.attach(module)
    progress = SimpleNamespace(total=SimpleNamespace(processed=12 * (epoch + 1)))
    trainer = SimpleNamespace(
        current_epoch=epoch,
        global_step=12 * (epoch + 1),
        strategy=None,
        world_size=1,
        callbacks=[],
        max_epochs=10,
        max_steps=-1,
        num_training_batches=12,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )
    loss = SampleLoss(INDEX, cross_entropy, None)
    run = TrainingRun(trainer, module, TrainLoader.find(loader(TOY)), INDEX, loss, reader)
    rule, criterion = rule or SignedSteps(alpha=0.05), EqualizedOdds() if criterion is None else criterion
    return FairFit(run, criterion, rule, Given() if estimate is None else estimate, importance, cross_entropy)


def new_sampler():
    return FairSampler.from_index(INDEX, 20)


def train(fit, samples, outputs=None):
    """Let the module of a fit see a batch, as Lightning would."""
    fit.before_batch()
    batch = TOY.x[samples], TOY.targets[samples]
    loss = fit.run.module.training_step(batch, 0)
    fit.after_forward()
    logits = fit.run.module(batch[0])
    fit.after_batch(drawn(samples), {"loss": loss} if outputs is None else outputs, batch)
    return logits


def drawn(samples):
    return Drawn(samples, INDEX.cells[samples])


FIRST, SECOND = list(range(20)), list(range(20, 40))
BATCH = None
"""For steps whose batch does not matter: it holds no labels to compare with."""


class TestUpdate:
    def test_is_what_criterion_and_rule_make_of_the_losses(self):
        fit, sampler = new_fit(), new_sampler()
        rule = SignedSteps(alpha=0.05)
        before = rule.start(INDEX.counts)
        assert torch.equal(fit.state.shares, before.shares)
        record = fit.update(sampler)
        expected = rule.update(before, measurement(LOSSES, INDEX.counts))
        assert torch.equal(record.losses, LOSSES)
        torch.testing.assert_close(record.gaps, torch.tensor([0.4, 0.7]).double())
        assert torch.equal(record.shares_before, before.shares)
        assert torch.equal(record.shares_after, expected.shares)
        assert not torch.equal(expected.shares, before.shares)
        assert torch.equal(sampler.shares, expected.shares)
        assert fit.history == [record]

    def test_goes_on_from_the_last(self):
        fit, sampler = new_fit(estimate := Given()), new_sampler()
        records = [fit.update(sampler) for _ in range(3)]
        assert estimate.asked == [(0, True), (1, True), (2, True)]
        assert fit.history == records
        assert torch.equal(records[1].shares_before, records[0].shares_after)
        moved = records[2].shares_after - records[0].shares_before
        assert float(moved.clamp(min=0).sum()) == pytest.approx(0.15)

    def test_is_of_the_current_epoch_unless_it_is_made_up_for(self):
        fit = new_fit(epoch=4)
        made = [fit.update(new_sampler()), fit.update(new_sampler(), epoch=3)]
        assert [(record.epoch, record.step) for record in made] == [(4, 60), (3, 60)]

    def test_rows_that_the_criterion_ignores_stay(self):
        record = new_fit(criterion=EqualOpportunity()).update(new_sampler())
        assert torch.equal(record.shares_after[0], record.shares_before[0])
        assert record.gaps[0].isnan()
        assert torch.equal(record.losses, LOSSES)  # but are measured, and written down

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_losses_that_are_not_finite_take_no_part_with_a_word(self, value):
        losses = LOSSES.clone()
        losses[1, 2] = value
        fit, sampler = new_fit(Given(losses)), new_sampler()
        with pytest.warns(FairBatchWarning, match=r"NaN or infinite in the cells \(label 1, group c\). They take no"):
            record = fit.update(sampler)
        assert record.shares_after[1, 2] == record.shares_before[1, 2]
        torch.testing.assert_close(record.gaps, torch.tensor([0.4, 0.2]).double())
        fit.update(sampler)  # no second word about the same cell
        losses[0, 0] = value
        with pytest.warns(FairBatchWarning, match=r"label 0, group a\), \(label 1, group c"):
            fit.update(sampler)

    def test_cells_without_samples_are_no_cause_for_a_word(self):
        class Empty(Given):
            def measure(self, run, update, *, uniform):
                return CellLosses(torch.full((2, 3), torch.nan), torch.zeros(2, 3))

        record = new_fit(Empty()).update(new_sampler())
        assert torch.equal(record.shares_after, record.shares_before)

    def test_measurements_are_averaged_over_the_window_of_the_rule(self):
        """By samples, of which a part is forgotten as the training goes on; the paper's rule takes the last ones."""
        first, second = LOSSES, LOSSES.flip(1)
        for rule, kept in ((Adaptive(), math.exp(-0.05 / Adaptive.window)), (SignedSteps(), 0.0)):
            fit, sampler = new_fit(estimate := Given(first), rule=rule), new_sampler()
            fit.update(sampler)
            fit.run.trainer.fit_loop.epoch_loop.batch_progress.total.processed += 6  # of 120
            estimate.losses = second
            record = fit.update(sampler)
            torch.testing.assert_close(record.losses, (second + kept * first) / (1 + kept))

    def test_a_cell_that_is_broken_for_a_while_comes_back(self):
        broken = LOSSES.clone()
        broken[1, 2] = torch.nan
        fit, sampler = new_fit(estimate := Given(LOSSES), rule=Adaptive()), new_sampler()
        fit.update(sampler)
        estimate.losses = broken
        with pytest.warns(FairBatchWarning, match="NaN or infinite"):
            record = fit.update(sampler)
        assert record.losses.isnan().sum() == 1
        estimate.losses = LOSSES
        assert torch.equal(fit.update(sampler).losses[1, 2], LOSSES[1, 2])

    def test_weighs_samples_by_their_losses_if_wanted(self):
        fit, sampler = new_fit(estimate := Given(), importance := Growing()), new_sampler()
        logits = train(fit, FIRST)
        fit.update(sampler)
        ((losses, update),) = importance.told
        assert update == 0
        expected = torch.nn.functional.cross_entropy(logits, TOY.targets[FIRST], reduction="none")
        assert losses[FIRST] == pytest.approx(expected.detach().numpy())
        assert np.isnan(losses[20:]).all()
        assert sampler.weighted
        fit.update(sampler)
        assert estimate.asked == [(0, True), (1, False)]  # batches do not hold a cell's samples equally often any more


class TestBatches:
    def test_are_shown_to_an_estimate_that_watches(self):
        fit = new_fit(estimate := Given(watches=True))
        for samples in (FIRST, SECOND):
            logits = train(fit, samples)
            shown, cells = estimate.observed[-1]
            assert torch.equal(shown, logits)
            assert not shown.requires_grad
            assert np.array_equal(cells, INDEX.cells[samples])
        assert len(estimate.observed) == 2

    def test_are_not_watched_in_vain(self):
        """The first are, to see that logits can be had, and whose they are; none after them if nobody wants them."""
        fit, expected = new_fit(estimate := Given()), []
        arm = fit.run.reader.expect
        fit.run.reader.expect = lambda size: (expected.append(size), arm(size))
        for _ in range(5):
            train(fit, FIRST)
        assert expected == [20] * FIRST_BATCHES
        assert estimate.observed == []

    def test_of_a_shorter_loader_may_be_none(self):
        fit = new_fit(estimate := Given(watches=True))
        fit.before_batch()
        fit.after_batch(None, {"loss": torch.zeros(())}, BATCH)
        assert estimate.observed == []
        train(fit, FIRST)
        assert len(estimate.observed) == 1

    def test_without_logits_are_refused_at_once(self):
        fit = new_fit()
        fit.before_batch()
        with pytest.raises(RuntimeError, match="FairBatch found no logits for a batch of 20 samples: `training_step`"):
            fit.after_batch(drawn(FIRST), {"loss": torch.zeros(())}, BATCH)

    def test_that_the_step_leaves_out_are_left_out(self):
        """Under automatic optimization that is what returning nothing means; under manual it means nothing."""
        fit = new_fit(estimate := Given(watches=True))
        fit.before_batch()
        fit.after_batch(drawn(FIRST), {}, BATCH)
        assert estimate.observed == []
        train(fit, SECOND)
        assert len(estimate.observed) == 1
        fit = new_fit()
        fit.run.module.automatic_optimization = False
        fit.before_batch()
        with pytest.raises(RuntimeError, match="found no logits"):
            fit.after_batch(drawn(FIRST), {}, BATCH)

    def test_after_the_first_may_lack_logits(self):
        fit = new_fit(estimate := Given(watches=True))
        train(fit, FIRST)
        fit.before_batch()
        fit.after_batch(drawn(SECOND), {"loss": torch.zeros(())}, BATCH)
        assert len(estimate.observed) == 1

    def test_with_returned_logits_under_manual_optimization(self):
        """They are taken from the module; a step that only returns them is refused: it cannot be run again."""
        fit = new_fit(estimate := Given(watches=True))
        fit.run.module.automatic_optimization = False
        logits = train(fit, FIRST, {"logits": torch.zeros(20, 2)})
        assert torch.equal(estimate.observed[0][0], logits)
        other = new_fit(Given(watches=True))
        other.run.module.automatic_optimization = False
        other.before_batch()
        with pytest.raises(RuntimeError, match="With manual optimization FairBatch cannot run `training_step`"):
            other.after_batch(drawn(SECOND), {"logits": torch.zeros(20, 2)}, BATCH)

    def test_whose_losses_cannot_be_had_are_refused_at_once(self):
        fit = new_fit()
        fit.before_batch()
        with pytest.raises(ValueError, match="one prediction per sample"):
            fit.after_batch(drawn(FIRST), {"logits": torch.zeros(20, 2, 5)}, BATCH)


class TestGoingOn:
    @pytest.mark.parametrize("alone", [True, False])
    def test_a_saved_state_is_plain_and_complete(self, alone, tmp_path):
        fit, sampler = new_fit(importance=Growing()), new_sampler()
        train(fit, FIRST, {"logits": torch.zeros(20, 2)})
        fit.update(sampler)
        train(fit, SECOND)
        torch.save(fit.state_dict(5, alone=alone), tmp_path / "state")
        again = new_fit(estimate := Given(), importance := Growing())
        again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert estimate.loaded == {"alone": alone}
        assert torch.equal(again.state.shares, fit.state.shares)
        assert again.state.updates == 1
        assert again.run.reader.training_step_returns
        assert [record.state_dict().keys() for record in again.history] == [fit.history[0].state_dict().keys()]
        assert torch.equal(again.history[0].losses, LOSSES)
        record, expected = again.update(sampler), fit.update(sampler)
        assert torch.equal(record.shares_after, expected.shares_after)
        ((losses, update),) = importance.told
        assert update == 1
        assert np.isfinite(losses[:40]).all()
        assert np.isnan(losses[40:]).all()

    def test_an_update_that_was_missed(self):
        """A checkpoint may be of after the last update, and a resumed run is told so once."""
        fit, sampler = new_fit(epoch=2), new_sampler()
        assert fit.left_epoch() is None
        resumed = new_fit(epoch=2)
        resumed.load_state_dict(fit.state_dict(2, alone=False))
        assert resumed.left_epoch() == 2
        assert resumed.left_epoch() is None
        assert resumed.is_behind
        resumed.update(sampler, epoch=2)
        assert not resumed.is_behind
        fit.update(sampler)  # now it was made before the checkpoint
        resumed = new_fit(epoch=2)
        resumed.load_state_dict(fit.state_dict(2, alone=False))
        assert resumed.left_epoch() is None

    @pytest.mark.parametrize("same", [True, False])
    def test_reloaded_data(self, same):
        """What is known about single samples is forgotten if they are others."""
        fit = new_fit(importance=(importance := Growing()))
        train(fit, FIRST)
        shares = fit.update(sampler := new_sampler()).shares_after
        fit.reload(fit.run, same_samples=same)
        fit.update(sampler)
        known = np.isfinite(importance.told[-1][0])
        assert known.sum() == (20 if same else 0)
        assert torch.equal(fit.history[-1].shares_before, shares)

    def test_a_copy_knows_what_happened_and_nothing_else(self):
        fit = new_fit()
        fit.update(new_sampler())
        copy = pickle.loads(pickle.dumps(fit))
        assert set(vars(copy)) == {"state", "history"}
        assert torch.equal(copy.state.shares, fit.state.shares)
        assert torch.equal(copy.history[0].losses, LOSSES)

    def test_closing_lets_go_of_what_the_estimate_needed(self):
        class Closing(Given):
            closed = False

            def close(self):
                self.closed = True

        fit = new_fit(estimate := Closing())
        fit.close()
        assert estimate.closed
