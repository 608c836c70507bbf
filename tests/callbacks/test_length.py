"""How long a training is: asked of real Trainers, while they train."""

from datetime import timedelta

import lightning as L
import pytest
import torch
from helpers import ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, Timer

from fairbatch_lightning import Adaptive, FairBatch
from fairbatch_lightning._support.lightning import batches_ever_trained_on
from fairbatch_lightning.callbacks.length import EPOCHS_AT_LEAST, expected_batches

pytestmark = pytest.mark.filterwarnings("ignore:No composition of the batches")
BATCHES = 12


class Asking(L.Callback):
    """Asks after every batch, and how many batches there really are in the end."""

    def __init__(self):
        self.asked, self.done = [], 0

    def on_train_batch_end(self, run, module, *_):
        self.done += 1
        assert batches_ever_trained_on(run) == self.done
        self.asked.append(expected_batches(run, module, BATCHES))


def asked(*callbacks, module=None, **options):
    asking = Asking()
    module = ToyModule() if module is None else module
    trainer(*callbacks, asking, **options).fit(module, loader())
    assert len(asking.asked) == asking.done
    return asking


class Manual(ToyModule):
    """Two optimizer steps for every batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"max_epochs": 3}, 36),
        ({"max_epochs": 3, "limit_train_batches": 5}, 15),
        ({"max_epochs": 4, "limit_train_batches": 0.5}, 24),
        ({"max_epochs": -1, "max_steps": 20}, 20),
        ({"max_epochs": 1, "max_steps": 20}, 12),
        ({"max_epochs": 9, "max_steps": 20, "accumulate_grad_batches": 3}, 60),
        ({"max_epochs": -1, "max_steps": 6, "accumulate_grad_batches": 5}, 24),  # the last step of an epoch takes two
        ({"max_epochs": -1, "max_steps": 6, "max_time": timedelta(days=1)}, 6),
    ],
)
def test_what_the_trainer_says_is_known_from_the_beginning(options, batches):
    asking = asked(**options)
    assert asking.done == batches
    assert asking.asked == [batches] * batches


def test_steps_by_hand_are_counted_as_they_come():
    asking = asked(module=Manual(), max_epochs=-1, max_steps=30)
    assert asking.asked == [15] * 15


def test_accumulation_that_changes_on_the_way():
    schedule = GradientAccumulationScheduler({0: 1, 1: 4})
    asking = asked(schedule, max_epochs=-1, max_steps=18)
    assert asking.asked[0] == 18
    assert asking.asked[-1] == asking.done == BATCHES + 6 * 4


class TestUnknownEnd:
    def test_without_any(self):
        class Stop(L.Callback):
            def on_train_epoch_end(self, run, module):
                run.should_stop = run.current_epoch == 14

        asking = asked(Stop(), max_epochs=-1)
        assert asking.asked[0] == EPOCHS_AT_LEAST * BATCHES
        assert asking.asked[-1] == 2 * 15 * BATCHES
        assert all(now >= before for before, now in zip(asking.asked, asking.asked[1:], strict=False))

    def test_early_stopping_may_be_soon(self):
        stopping = EarlyStopping("fairbatch/gap_max", patience=99, strict=False, check_on_train_epoch_end=True)
        module = ToyModule()
        asking = Asking()
        fairbatch = FairBatch(groups="group")
        trainer(fairbatch, stopping, asking, max_epochs=16).fit(module, loader())
        assert asking.asked[0] == EPOCHS_AT_LEAST * BATCHES
        assert asking.asked[-1] == 16 * BATCHES  # never more than there can be
        other = asked(max_epochs=16)
        assert set(other.asked) == {16 * BATCHES}

    def test_time(self):
        """By how long the batches so far took: a second each, by this clock."""

        class Clock(Timer):
            seconds = 0

            def on_train_batch_end(self, *args):
                self.seconds += 1
                super().on_train_batch_end(*args)

            def time_elapsed(self, stage="train"):
                return float(self.seconds)

        asking = asked(Clock(timedelta(seconds=30)), max_epochs=-1)
        assert asking.asked == [30] * 30
        asking = asked(Clock(timedelta(days=1)), max_epochs=2)
        assert asking.asked == [24] * 24  # the epochs end first


class Recorded(Adaptive):
    """Keeps what it was told of the time; of this class only."""

    passed = []  # noqa: RUF012

    def update(self, state, measured):
        self.passed.append(measured.passed)
        return super().update(state, measured)


@pytest.fixture
def recorded():
    Recorded.passed.clear()
    return Recorded


class TestUpdates:
    @pytest.mark.parametrize(("epochs", "updates"), [(3, 36), (17, 17 * 12), (30, 30 * 6), (100, 100 * 2), (250, 250)])
    def test_about_200_and_always_after_an_epoch(self, epochs, updates):
        fairbatch = FairBatch(groups="group")
        trainer(fairbatch, max_epochs=epochs).fit(ToyModule(), loader())
        steps = [record.step for record in fairbatch.history]
        assert len(steps) == updates
        assert set(range(BATCHES, epochs * BATCHES + 1, BATCHES)) <= set(steps)

    def test_the_parts_that_pass_make_up_the_whole(self, recorded):
        trainer(FairBatch(groups="group", rule=recorded()), max_epochs=30).fit(ToyModule(), loader())
        assert sum(recorded.passed) == pytest.approx(1)
        assert recorded.passed == pytest.approx([1 / 180] * 180)

    @pytest.mark.parametrize("every", [5, "epoch"])
    def test_a_number_still_works(self, every, recorded):
        trainer(FairBatch(groups="group", rule=recorded(), update_every=every), max_epochs=10).fit(
            ToyModule(), loader()
        )
        batches = 12 if every == "epoch" else 5
        assert recorded.passed == pytest.approx([batches / 120] * (120 // batches))

    @pytest.mark.parametrize("estimate", ["exact", "sampled"])
    def test_no_updates_within_epochs_that_would_cost_an_evaluation(self, estimate):
        fairbatch = FairBatch(groups="group", estimate=estimate)
        trainer(fairbatch, max_epochs=3).fit(ToyModule(), loader())
        assert [record.step for record in fairbatch.history] == [12, 24, 36]

    def test_going_on_with_more_epochs(self, recorded, tmp_path):
        """The parts are of the longer training from then on, and what was learnt stays."""
        keep = ModelCheckpoint(tmp_path, filename="last")
        first = FairBatch(groups="group", rule=recorded())
        trainer(first, keep, max_epochs=2, enable_checkpointing=True).fit(ToyModule(), loader())
        assert sum(recorded.passed) == pytest.approx(1)
        recorded.passed.clear()
        second = FairBatch(groups="group", rule=recorded())
        resume(trainer(second, max_epochs=6), ToyModule(), loader(), tmp_path / "last.ckpt")
        assert recorded.passed == pytest.approx([1 / 72] * 48)
        assert torch.equal(second.history[24].shares_before, first.shares)
