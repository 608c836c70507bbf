"""A run that is stopped and resumed from any checkpoint is, bit for bit, the run that never stopped."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import pytest
import torch
from canonical import new_fairbatch
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.imports import RequirementCache
from torch.utils.data import DataLoader

from fairbatch_lightning import Adaptive, FairBatch, FairBatchWarning, SignedSteps
from fairbatch_lightning.measure.estimates.online import OnlineEstimate

EPOCHS, BATCHES = 4, 12
HERE = Path(__file__).parent


class Validated(ToyModule):
    """With BatchNorm, whose statistics are part of the state, and a validation loop."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self(x), y))


def run(ckpt_path=None, checkpoint=None, num_workers=0, arguments=None, options=None, module=None):
    """Train, from a checkpoint if there is one; return the module and the callback."""
    torch.manual_seed(0)
    module, callback = module or Validated(), new_fairbatch(**(arguments or {}))
    callbacks = [callback] if checkpoint is None else [callback, checkpoint]
    fit = trainer(
        *callbacks,
        num_sanity_val_steps=0,
        **({} if checkpoint is None else {"enable_checkpointing": True}),
        **{"max_epochs": EPOCHS, **(options or {})},
    )
    data = loader(num_workers=num_workers, persistent_workers=num_workers > 0)
    resume(fit, module, data, ckpt_path, DataLoader(Toy(), batch_size=60))
    return module, callback


class Failing(Validated):
    """Fails after some batches: in the next one, or while it is evaluated after them."""

    def __init__(self, after, *, evaluated=False):
        super().__init__()
        self.after, self.evaluated = after, evaluated

    def training_step(self, batch, batch_idx):
        if len(self.batches) == self.after and self.training != self.evaluated:
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)


def assert_same(resumed, whole):
    (module, callback), (expected, expected_callback) = resumed, whole
    assert module.batches == expected.batches[len(expected.batches) - len(module.batches) :]
    assert len(callback.history) == len(expected_callback.history)
    for record, other in zip(callback.history, expected_callback.history, strict=True):
        assert (record.epoch, record.step) == (other.epoch, other.step)
        for name in ("losses", "gaps", "shares_before", "shares_after"):
            assert torch.equal(getattr(record, name), getattr(other, name)), name
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


NEED_NEW_LIGHTNING = (
    "gradient accumulation",
    "shortened epochs",
    "the bare line, within epochs",
    "adaptive, within epochs",
    "adaptive, validation",
    "adaptive, accumulation",
)


def skip_old_lightning():
    """Versions before 2.5 take the batch that a checkpoint was written after for one that is still to come."""
    if not (met := RequirementCache("lightning>=2.5")):
        pytest.skip(str(met))


class Seldom(Adaptive):
    """With few enough updates that several batches pass between them, of a number that divides no epoch."""

    updates = 10


SCENARIOS = {
    "the bare line, epoch end": ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, {"rule": "adaptive"}, {}),
    "the bare line, within epochs": ({"every_n_train_steps": 5}, {"rule": "adaptive"}, {}),
    "adaptive, within epochs": ({"every_n_train_steps": 3}, {"rule": Seldom()}, {}),
    "adaptive, last batch": ({"every_n_train_steps": BATCHES}, {"rule": Seldom()}, {}),
    "adaptive, validation": (
        {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        {"rule": Seldom(), "estimate": "validation"},
        {"val_check_interval": 5},
    ),
    "adaptive, accumulation": ({"every_n_train_steps": 2}, {"rule": Seldom()}, {"accumulate_grad_batches": 3}),
    "adaptive, an end in steps": ({"every_n_train_steps": 5}, {"rule": Seldom()}, {"max_steps": 38}),
    "epoch end": ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, {}, {}),
    "within epochs": ({"every_n_train_steps": 5}, {}, {}),
    "last batch of epochs": ({"every_n_train_steps": BATCHES}, {}, {}),
    "validation at epoch end": ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, {}, {}),
    "validation within epochs": (
        {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        {},
        {"val_check_interval": 5},
    ),
    "gradient accumulation": ({"every_n_train_steps": 3}, {}, {"accumulate_grad_batches": 3}),
    "updates within epochs": ({"every_n_train_steps": 5}, {"update_every": 7}, {}),
    "shortened epochs": ({"every_n_train_steps": 3}, {}, {"limit_train_batches": 7}),
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_resume_from_every_checkpoint(scenario, num_workers, tmp_path):
    how, arguments, options = SCENARIOS[scenario]
    if scenario in NEED_NEW_LIGHTNING:
        skip_old_lightning()
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, **how)
    assert_resumable(checkpoint, tmp_path, num_workers, arguments, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "estimate"),
    [
        ("within epochs", "exact"),
        ("last batch of epochs", "exact"),
        ("within epochs", "sampled"),
        ("updates within epochs", "sampled"),
        ("within epochs", "validation"),
        ("validation at epoch end", "validation"),
        ("validation within epochs", "validation"),
    ],
)
def test_resume_with_other_estimates(scenario, estimate, tmp_path):
    how, arguments, options = SCENARIOS[scenario]
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, **how)
    assert_resumable(checkpoint, tmp_path, 0, {**arguments, "estimate": estimate}, options)


class FailingValidation(Validated):
    """Fails in a batch of a validation."""

    def __init__(self, validation, batch):
        super().__init__()
        self.fails_at, self.validation = (validation, batch), -1

    def on_validation_epoch_start(self):
        self.validation += 1

    def validation_step(self, batch, batch_idx):
        if (self.validation, batch_idx) == self.fails_at:
            raise RuntimeError("out of luck")
        super().validation_step(batch, batch_idx)


LEFT_OUT = "which Lightning does not repeat, or not in full"


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 0.5},
        {"val_check_interval": 3},
        {"val_check_interval": 7},
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2},
    ],
    ids=str,
)
def test_validation_that_lightning_leaves_out_is_named(options, tmp_path):
    """A checkpoint in `on_train_batch_end` is older than the validation that may follow: it is exact, or a warning."""
    skip_old_lightning()
    options = {"max_epochs": 2, **options}
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    whole = run(None, checkpoint, 0, {"estimate": "validation"}, options)
    validated = {record.step for record in whole[1].history}
    assert validated
    for step in range(1, 2 * BATCHES + 1):
        path = tmp_path / f"step={step}.ckpt"
        if step in validated:
            with pytest.warns(FairBatchWarning, match=f"epoch {(step - 1) // BATCHES}.*{LEFT_OUT}"):
                _, callback = run(path, None, 0, {"estimate": "validation"}, options)
            assert len(callback.history) == len(whole[1].history) - 1
        else:
            assert_same(run(path, None, 0, {"estimate": "validation"}, options), whole)


@pytest.mark.parametrize(("validation", "batch"), [(0, 0), (1, 2), (2, 3)])
def test_validation_that_failed_is_named(validation, batch, tmp_path):
    skip_old_lightning()
    arguments, options = {"estimate": "validation"}, {"val_check_interval": 6}
    with pytest.raises(RuntimeError, match="out of luck"):
        run(None, OnExceptionCheckpoint(tmp_path), 0, arguments, options, FailingValidation(validation, batch))
    with pytest.warns(FairBatchWarning, match=LEFT_OUT):
        run(tmp_path / "on_exception.ckpt", None, 0, arguments, options)


def test_validation_that_is_repeated_in_the_same_trainer_is_not_named():
    callback, module = new_fairbatch(estimate="validation"), FailingValidation(1, 1)
    fit, held_out = trainer(callback, num_sanity_val_steps=0), DataLoader(Toy(), batch_size=60)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit.fit(module, loader(), held_out)
    fit.fit(module, loader(), held_out)
    assert [record.epoch for record in callback.history] == [0, 1, 2]


def assert_resumable(checkpoint, tmp_path, num_workers, arguments, options):
    whole = run(None, checkpoint, num_workers, arguments, options)
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("step=")[1].split("-")[0]))
    assert len(paths) >= 3
    resumed_batches = set()
    for path in paths:
        resumed = run(path, None, num_workers, arguments, options)
        assert_same(resumed, whole)
        resumed_batches.add(len(resumed[0].batches))
    assert len(resumed_batches) >= 3


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [3, 5, 14, 35])
@pytest.mark.parametrize(
    "arguments",
    [
        {"update_every": 5},
        {"rule": Seldom()},
        {"rule": "adaptive"},
        {"importance": "loss"},
    ],
    ids=str,
)
def test_resume_after_a_failed_batch(arguments, after, num_workers, tmp_path):
    """The checkpoint is of within that batch, which is drawn again."""
    skip_old_lightning()
    with pytest.raises(RuntimeError, match="out of luck"):
        run(None, OnExceptionCheckpoint(tmp_path), num_workers, arguments, module=Failing(after))
    assert_same(
        run(tmp_path / "on_exception.ckpt", None, num_workers, arguments), run(None, None, num_workers, arguments)
    )


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("after", "arguments"),
    [
        *((after, {"update_every": 6, "estimate": "exact"}) for after in (6, 12, 30)),
        *((after, {"update_every": 5, "estimate": OnlineEstimate(samples_per_cell=60)}) for after in (5, 25)),
        *((after, {"estimate": "exact"}) for after in (BATCHES, 3 * BATCHES)),
    ],
)
def test_resume_after_a_failed_evaluation(arguments, after, num_workers, tmp_path):
    """The update that failed is made when the run is resumed."""
    skip_old_lightning()
    with pytest.raises(RuntimeError, match="out of luck"):
        run(None, OnExceptionCheckpoint(tmp_path), num_workers, arguments, module=Failing(after, evaluated=True))
    resumed = run(tmp_path / "on_exception.ckpt", None, num_workers, arguments)
    assert_same(resumed, run(None, None, num_workers, arguments))


def test_an_update_that_is_not_made_up_for_is_named(tmp_path):
    """After the last epoch Lightning does nothing any more."""
    arguments, module = {"estimate": "exact"}, Failing(EPOCHS * BATCHES, evaluated=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(None, OnExceptionCheckpoint(tmp_path), 0, arguments, module=module)
    with pytest.warns(FairBatchWarning, match="before the last update of the shares, and there is nothing left"):
        _, callback = run(tmp_path / "on_exception.ckpt", None, 0, arguments)
    assert [record.epoch for record in callback.history] == list(range(EPOCHS - 1))


class Signalled(Validated):
    """Gets a signal in the batch after some others, or while it is evaluated after them; once."""

    def __init__(self, after, number, *, evaluated=False):
        super().__init__()
        self.after, self.number, self.evaluated = after, number, evaluated

    def training_step(self, batch, batch_idx):
        if len(self.batches) == self.after and self.training != self.evaluated and self.number is not None:
            number, self.number = self.number, None
            signal.raise_signal(number)
        return super().training_step(batch, batch_idx)


class SavesOnSignal(Callback):
    """Saves a checkpoint at once when SIGUSR1 comes, as Lightning does under SLURM."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, fit, module):
        self.before = signal.signal(signal.SIGUSR1, lambda *_: fit.save_checkpoint(self.path))

    def on_train_end(self, *_):
        signal.signal(signal.SIGUSR1, self.before)


@pytest.mark.parametrize(
    ("arguments", "after", "evaluated"),
    [
        ({"update_every": 5}, 8, False),
        ({"update_every": 5}, 10, False),
        ({"rule": "adaptive"}, 14, False),
        ({"importance": "loss"}, 17, False),
        ({"update_every": 5, "estimate": "exact"}, 10, True),
        ({"estimate": "exact"}, 2 * BATCHES, True),
    ],
)
def test_resume_from_a_signal(arguments, after, evaluated, tmp_path):
    """The run goes on undisturbed; the checkpoint is of within a batch, or within an update."""
    skip_old_lightning()
    whole, path = run(None, None, 0, arguments), tmp_path / "signal.ckpt"
    module = Signalled(after, signal.SIGUSR1, evaluated=evaluated)
    assert_same(run(None, SavesOnSignal(path), 0, arguments, module=module), whole)
    assert_same(run(path, None, 0, arguments), whole)


def test_resume_from_a_signal_while_losses_are_computed(tmp_path):
    """At the end of an epoch, of all its batches at once."""
    skip_old_lightning()
    signals = [signal.SIGUSR1]

    def loss(logits, labels):
        if len(logits) > 20 and signals:
            signal.raise_signal(signals.pop())
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    whole = run(None, SavesOnSignal(path := tmp_path / "signal.ckpt"), 0, {"loss": loss})
    assert not signals
    assert_same(whole, run(None, None, 0, {"loss": loss}))
    assert_same(run(path, None, 0, {"loss": loss}), whole)


class SignalledAfterBatch(Validated):
    """Gets a signal when a batch is trained on, but was not shown to callbacks yet."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, *_):
        if self.global_step == 15 and self.trainer.ckpt_path is None:
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(("arguments", "partial"), [({}, True), ({"estimate": "exact"}, False)])
def test_resume_from_a_signal_that_hides_a_batch(arguments, partial, tmp_path):
    skip_old_lightning()
    whole = run(None, SavesOnSignal(path := tmp_path / "signal.ckpt"), 0, arguments, module=SignalledAfterBatch())
    with pytest.warns(FairBatchWarning, match="Not all that was seen since") if partial else nullcontext():
        resumed = run(path, None, 0, arguments, module=SignalledAfterBatch())
    if not partial:
        assert_same(resumed, whole)


@pytest.mark.parametrize(
    ("estimate", "after", "exact"),
    [("online", 15, True), ("online", 23, True), ("validation", 15, True), ("validation", 17, False)],
)
def test_resume_from_a_termination(estimate, after, exact, tmp_path):
    """Lightning ends the run after the batch, or within the validation that follows it."""
    skip_old_lightning()
    arguments, options = {"estimate": estimate}, {"val_check_interval": 6}
    with pytest.raises(SIGTERMException):
        run(None, OnExceptionCheckpoint(tmp_path), 0, arguments, options, Signalled(after, signal.SIGTERM))
    with nullcontext() if exact else pytest.warns(FairBatchWarning, match=LEFT_OUT):
        resumed = run(tmp_path / "on_exception.ckpt", None, 0, arguments, options)
    if exact:
        assert_same(resumed, run(None, None, 0, arguments, options))


@pytest.mark.parametrize("arguments", [{}, {"rule": Seldom()}, {"estimate": "exact"}], ids=str)
def test_resume_from_the_last_step(arguments, tmp_path):
    """Training ends within an epoch; the update after it is not in the checkpoint of the step, and nothing follows."""
    skip_old_lightning()
    options = {"max_steps": 38}
    whole = run(None, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=19), 0, arguments, options)
    assert_same(run(tmp_path / "step=38.ckpt", None, 0, arguments, options), whole)
    assert_same(run(tmp_path / "step=19.ckpt", None, 0, arguments, options), whole)


KILLED = """
import sys, time
sys.path[:0] = [{here!r}, {tests!r}]
import test_resume
from lightning.pytorch.callbacks import ModelCheckpoint

class Slow(ModelCheckpoint):
    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        time.sleep(0.1)

test_resume.run(None, Slow({folder!r}, filename="{{step}}", save_top_k=-1, every_n_train_steps=4), num_workers=2)
"""


@pytest.mark.slow
def test_resume_after_kill_minus_nine(tmp_path):
    """The process is killed within an epoch, its worker processes alive and ahead of it."""
    code = textwrap.dedent(KILLED).format(here=str(HERE), tests=str(HERE.parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("step=16.ckpt")):
            assert process.poll() is None, "training ended too early"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.15)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    last = paths[-1]
    assert int(last.stem.split("=")[1]) < EPOCHS * BATCHES - 4
    assert_same(run(last, num_workers=2), run(num_workers=2))


def test_resume_with_another_batch_size_says_so(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=5)
    _, whole = run(None, checkpoint)
    callback, module = new_fairbatch(), Validated()
    with pytest.warns(
        FairBatchWarning, match="middle of epoch 1, which had 12 batches of 20 samples and now has 24 of 10"
    ):
        resume(trainer(callback, max_epochs=3), module, loader(batch_size=10), tmp_path / "step=20.ckpt")
    assert torch.equal(callback.history[1].shares_before, whole.history[0].shares_after)
    assert [record.epoch for record in callback.history] == [0, 1, 2]


def test_checkpoint_is_plain_data(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=5)
    run(None, checkpoint)
    state = torch.load(tmp_path / "step=5.ckpt", weights_only=True)["callbacks"]["FairBatch"]
    assert state["sampler"]["next_batch"] == 5
    assert state["counts"].sum() == 240


class Estimating(Validated):
    """Builds the loader before the checkpoint is restored, as schedules over all steps do."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader()


def test_resume_with_reloaded_loaders(tmp_path):
    def job(path, *callbacks):
        module, callback = Estimating(), new_fairbatch()
        torch.manual_seed(0)
        run = trainer(
            callback,
            *callbacks,
            max_epochs=3,
            reload_dataloaders_every_n_epochs=1,
            enable_checkpointing=bool(callbacks),
        )
        resume(run, module, None, path, None, Data())
        return module, callback

    whole = job(None, ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=8))
    for step in (8, 16, 24):
        assert_same(job(tmp_path / f"step={step}.ckpt"), whole)


class Two(ToyModule):
    def training_step(self, batch, batch_idx):
        x, y, index = batch["fair"]
        if self.training:
            self.batches.append(index.tolist())
        return torch.nn.functional.cross_entropy(self(x), y) + 0 * batch["other"][0].sum()


def test_resume_with_several_loaders_from_the_last_batch_of_an_epoch(tmp_path):
    def job(path, *callbacks):
        module, callback = Two(), new_fairbatch(loader="fair")
        run = trainer(callback, *callbacks, max_epochs=3, enable_checkpointing=bool(callbacks))
        resume(run, module, {"fair": loader(), "other": loader(Toy(seed=1))}, path)
        return module, callback

    skip_old_lightning()
    whole = job(None, ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=BATCHES))
    assert_same(job(tmp_path / "step=12.ckpt"), whole)


def test_missed_update_is_made_up_for_with_another_batch_size(tmp_path):
    _, whole = run(None, ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=BATCHES))
    callback = new_fairbatch()
    resume(trainer(callback, max_epochs=2), Validated(), loader(batch_size=10), tmp_path / "step=12.ckpt")
    assert [record.epoch for record in callback.history] == [0, 1]
    assert torch.equal(callback.history[0].shares_after, whole.history[0].shares_after)


def test_other_groups_with_the_same_counts_are_refused(tmp_path):
    first = trainer(FairBatch(groups="group"), max_epochs=1)
    first.fit(ToyModule(), loader())
    first.save_checkpoint(tmp_path / "last.ckpt")
    renamed = FairBatch(groups=[name.upper() for name in Toy().group])
    with pytest.raises(ValueError, match=r"labels and groups .*'a', 'b', 'c'.* had the counts .*, now .*'A', 'B', 'C'"):
        resume(trainer(renamed, max_epochs=2), ToyModule(), loader(), tmp_path / "last.ckpt")


def test_a_fit_that_goes_on_in_the_same_trainer():
    """More epochs, the same Trainer and module: Lightning goes on at the next epoch, and so do the shares."""
    whole, expected = new_fairbatch(), ToyModule()
    trainer(whole, max_epochs=4).fit(expected, loader())
    callback, module = new_fairbatch(), ToyModule()
    job = trainer(callback, max_epochs=2)
    job.fit(module, loader())
    job.fit_loop.max_epochs = 4
    job.fit(module, loader())
    assert module.batches == expected.batches
    assert [record.epoch for record in callback.history] == [0, 1, 2, 3]
    assert torch.equal(callback.shares, whole.shares)


def test_a_larger_floor_lifts_the_shares_of_the_checkpoint(tmp_path):
    _, whole = run(None, ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=20))
    assert whole.history[0].shares_after.min() < 0.3
    module, callback = Validated(), new_fairbatch(rule=SignedSteps(alpha=0.05, min_share=0.3))
    resume(trainer(callback, max_epochs=EPOCHS), module, loader(), tmp_path / "step=20.ckpt")
    assert torch.equal(callback.history[0].shares_after, whole.history[0].shares_after)
    for record in callback.history[1:]:
        for shares in (record.shares_before, record.shares_after):
            assert shares.min() >= 0.3
            torch.testing.assert_close(shares.sum(1), torch.ones(2, dtype=torch.float64))
    drawn = torch.bincount(Toy().group_ids[torch.tensor(module.batches[:4]).flatten()], minlength=3) / 80
    assert (drawn > 0.25).all(), "the rest of the epoch is drawn by the old shares"


class Interrupted(Validated):
    """Is stopped once, after some batches, and counts the validations."""

    def __init__(self, after, error):
        super().__init__()
        self.after, self.error, self.validations = after, error, 0

    def on_train_batch_start(self, batch, batch_idx):
        if len(self.batches) == self.after and self.error is not None:
            error, self.error = self.error, None
            raise error

    def on_validation_epoch_end(self):
        self.validations += 1


@pytest.fixture
def _keep_sigint():
    """Lightning ignores the signal from the first one on."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("_keep_sigint")
@pytest.mark.parametrize(("error", "after"), [(KeyboardInterrupt, BATCHES + 5), (RuntimeError, 5)])
@pytest.mark.parametrize("settings", [{"rule": "adaptive"}, {}, {"update_every": 3}, {"estimate": "validation"}])
def test_an_interrupted_fit_that_goes_on_in_the_same_trainer(settings, after, error):
    """Lightning repeats the epoch from its start; the shares go on."""

    def job(*callbacks):
        module, fit = Interrupted(after, error()), trainer(*callbacks, max_epochs=3, num_sanity_val_steps=0)
        held_out = DataLoader(Toy(), batch_size=60)
        with pytest.raises((SystemExit, RuntimeError)):
            fit.fit(module, loader(), held_out)
        known = [callback.history for callback in callbacks]
        fit.fit(module, loader(), held_out)
        return module, known

    (plain, _), (module, (known,)) = job(), job(callback := new_fairbatch(**settings))
    assert len(module.batches) == len(plain.batches) == after + (3 - after // BATCHES) * BATCHES
    assert module.validations == plain.validations == 3
    assert len(callback.history) > len(known)
    for record, before in zip(callback.history, known, strict=False):
        assert torch.equal(record.shares_after, before.shares_after)
    for record, following in zip(callback.history, callback.history[1:], strict=False):
        assert torch.equal(record.shares_after, following.shares_before)
    first, repeated = module.batches[after - after % BATCHES : after], module.batches[after : after + BATCHES]
    if len(known) == after // BATCHES:  # the shares have not moved since the epoch began
        assert repeated[: len(first)] == first
