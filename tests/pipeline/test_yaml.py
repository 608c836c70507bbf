"""Everything that the callbacks can be told in Python can be told in a YAML file for LightningCLI."""

import inspect
import math
import sys
from collections.abc import Iterator

import lightning as L
import pytest
import yaml
from helpers import Toy, ToyModule, loader
from lightning.pytorch.cli import LightningCLI
from torch.nn import functional
from torch.utils.data import DataLoader

from fairbatch_lightning import (
    Adaptive,
    DemographicParity,
    EqualizedOdds,
    EqualOpportunity,
    ExactEstimate,
    FairBatch,
    FairnessMonitor,
    LossRank,
    OnlineEstimate,
    SampledEstimate,
    SignedSteps,
    ValidationEstimate,
    WorstCase,
)
from fairbatch_lightning.callbacks.base import ChangesBatches
from fairbatch_lightning.callbacks.baselines import (
    AdversarialDebiasing,
    Boosting,
    Cutting,
    FairnessConstraints,
    GroupDRO,
    Resampling,
    Reweighing,
)

QUIET = {
    "max_epochs": 2,
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def made(kind, /, **init_args):
    """Return how a file says that an object of a class is to be made."""
    return {"class_path": f"fairbatch_lightning.{kind}", "init_args": init_args}


FAIRBATCH = [  # an argument, what the file says, and what Python says
    ("criterion", "equal_opportunity", EqualOpportunity()),
    ("criterion", made("EqualizedOdds", min_samples=20), EqualizedOdds(20)),
    ("criterion", made("EqualOpportunity", positive_label=1, min_samples=2), EqualOpportunity(1, 2)),
    ("criterion", made("DemographicParity", positive_label="hired", min_samples=2), DemographicParity("hired", 2)),
    ("groups", "race", "race"),
    ("groups", ["race", "gender"], ["race", "gender"]),
    ("groups", {"race": "skin", "gender": 3}, {"race": "skin", "gender": 3}),
    ("groups", 2, 2),
    ("groups", "2", "2"),
    ("groups", "true", "true"),
    ("groups", ["1", 2], ["1", 2]),
    ("labels", "targets", "targets"),
    ("criterion", made("DemographicParity", positive_label="true"), DemographicParity("true")),
    ("logits", "0", "0"),
    ("rule", made("SignedSteps", alpha=0.05), SignedSteps(0.05)),
    (
        "rule",
        made("SignedSteps", tolerance=math.inf, min_share=0.02, compare="all", pull=3),
        SignedSteps(tolerance=math.inf, min_share=0.02, compare="all", pull=3),
    ),
    ("rule", made("SignedSteps", alpha="math.exp"), SignedSteps(math.exp)),
    ("rule", "paper", "paper"),
    ("rule", made("Adaptive", tolerance=0.05), Adaptive(0.05)),
    ("rule", made("WorstCase", radius=0.3, alpha=0.2), WorstCase(0.3, 0.2)),
    ("estimate", "exact", ExactEstimate()),
    ("estimate", made("OnlineEstimate", samples_per_cell=10, batch_size=5), OnlineEstimate(10, 5)),
    ("estimate", made("SampledEstimate", samples_per_cell=10, batch_size=5), SampledEstimate(10, 5)),
    ("estimate", made("ExactEstimate", batch_size=5), ExactEstimate(5)),
    (
        "estimate",
        made("ValidationEstimate", loader=1, labels="y", groups=["race"]),
        ValidationEstimate(1, labels="y", groups=["race"]),
    ),
    ("update_every", 32, 32),
    ("update_every", "epoch", "epoch"),
    ("importance", "loss", LossRank()),
    ("importance", made("LossRank", pressure=10, decay=0.98), LossRank(10, 0.98)),
    ("loss", "torch.nn.functional.cross_entropy", functional.cross_entropy),
    ("logits", "net", "net"),
    ("loader", "labelled", "labelled"),
    ("loader", 1, 1),
    ("seed", 3, 3),
    ("verbose", False, False),
]
MONITOR = [
    ("groups", ["race", "gender"], ["race", "gender"]),
    ("labels", "targets", "targets"),
    ("stages", ["test"], ["test"]),
    ("positive_label", "hired", "hired"),
    ("positive_label", 1, 1),
    ("groups", "2", "2"),
    ("name", "2", "2"),
    ("logits", "net", "net"),
    ("threshold", 0.5, 0.5),
    ("min_samples", 20, 20),
    ("name", "gender", "gender"),
]


SHARED = [  # of all baselines
    ("groups", "race", "race"),
    ("groups", ["race", "gender"], ["race", "gender"]),
    ("groups", {"race": "skin", "gender": 3}, {"race": "skin", "gender": 3}),
    ("groups", 2, 2),
    ("labels", "targets", "targets"),
    ("loader", "labelled", "labelled"),
    ("loader", 1, 1),
    ("seed", 3, 3),
]
OF_CRITERION = [
    ("criterion", "demographic_parity", DemographicParity()),
    ("criterion", made("EqualOpportunity", positive_label="hired"), EqualOpportunity("hired")),
]
OF_LOSS = [
    ("loss", "torch.nn.functional.mse_loss", functional.mse_loss),
    ("logits", "net", "net"),
]
BASELINES = {
    Cutting: [*SHARED, *OF_CRITERION, ("across_labels", True, True)],
    Boosting: [*SHARED, *OF_CRITERION, ("across_labels", True, True)],
    Resampling: SHARED,
    Reweighing: [*SHARED, *OF_LOSS],
    GroupDRO: [*SHARED, *OF_LOSS, ("step_size", 0.5, 0.5), ("step_size", 1, 1)],
    FairnessConstraints: [*SHARED, *OF_CRITERION, *OF_LOSS, ("weight", 3, 3)],
    AdversarialDebiasing: [
        *SHARED,
        *OF_CRITERION,
        *OF_LOSS,
        ("weight", 0.5, 0.5),
        ("lr", 0.01, 0.01),
        ("hidden", 8, 8),
    ],
}


class Validated(ToyModule):
    def validation_step(self, batch, batch_idx):
        self(batch[0])


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return DataLoader(Toy(seed=1), batch_size=50)


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    """Lightning objects to those of pytest next to those that it is given."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


def cli(file, *callbacks, fit=False, **trainer):
    """Run LightningCLI with a file; these callbacks, if there are any, are written into it first."""
    if callbacks:
        file.write_text(yaml.safe_dump({"trainer": {**QUIET, **trainer, "callbacks": list(callbacks)}}))
    args = [*(["fit"] if fit else []), "--config", str(file)]
    return LightningCLI(Validated, Data, args=args, run=fit, seed_everything_default=False)


def callback_of(trainer, kind):
    (found,) = (callback for callback in trainer.callbacks if isinstance(callback, kind))
    return found


def parts(thing):
    """Return what an object is made of, so that two of them can be compared; iterators count as equal."""
    if hasattr(thing, "__dict__") and not callable(thing):
        return type(thing), {name: parts(part) for name, part in vars(thing).items()}
    return type(thing) if isinstance(thing, Iterator) else thing


@pytest.mark.parametrize(("argument", "in_file", "in_python"), FAIRBATCH)
def test_arguments_of_fairbatch(argument, in_file, in_python, tmp_path):
    run = cli(tmp_path / "config.yaml", made("FairBatch", **{argument: in_file})).trainer
    assert parts(callback_of(run, FairBatch)) == parts(FairBatch(**{argument: in_python})) != parts(FairBatch())


@pytest.mark.parametrize(("argument", "in_file", "in_python"), MONITOR)
def test_arguments_of_the_monitor(argument, in_file, in_python, tmp_path):
    run = cli(tmp_path / "config.yaml", made("FairnessMonitor", **{argument: in_file})).trainer
    found = parts(callback_of(run, FairnessMonitor))
    expected = FairnessMonitor(**{argument: in_python})
    for callback in (expected, plain := FairnessMonitor()):
        callback.log_dict = None
    assert found == parts(expected) != parts(plain)


def saved(from_file, folder):
    """Return the file that LightningCLI saves of what it was told."""
    again = folder / "saved.yaml"
    again.write_text(from_file.parser.dump(from_file.config, skip_none=False))
    return again


ALL = [
    *((FairBatch, "FairBatch", *case) for case in FAIRBATCH),
    *((FairnessMonitor, "FairnessMonitor", *case) for case in MONITOR),
    *((kind, f"callbacks.baselines.{kind.__name__}", *case) for kind, cases in BASELINES.items() for case in cases),
]


@pytest.mark.parametrize(("kind", "name", "argument", "in_file", "in_python"), ALL)
def test_what_the_cli_saves_says_the_same(kind, name, argument, in_file, in_python, tmp_path):
    first = cli(tmp_path / "config.yaml", made(name, **{argument: in_file}))
    again = cli(saved(first, tmp_path))
    found, expected = (callback_of(run.trainer, kind) for run in (again, first))
    assert parts(found) == parts(expected)
    if issubclass(kind, ChangesBatches):
        assert parts(found) == parts(kind(**{argument: in_python})) != parts(kind())


def test_none_is_left_out():
    """Arguments of the callbacks, and of all objects that FairBatch is made of."""
    for kind, cases in ((FairBatch, FAIRBATCH), (FairnessMonitor, MONITOR)):
        assert {argument for argument, _, _ in cases} == set(inspect.signature(kind).parameters)
    for kind, cases in BASELINES.items():
        own = {
            name
            for base in kind.__mro__
            if base.__module__.startswith("fairbatch_lightning") and "__init__" in vars(base)
            for name in inspect.signature(base).parameters
        } - {"arguments"}
        assert {argument for argument, _, _ in cases} == own
    objects = [(in_file, type(in_python)) for _, in_file, in_python in FAIRBATCH if "class_path" in str(in_file)]
    kinds = EqualizedOdds, EqualOpportunity, DemographicParity, SignedSteps, WorstCase, LossRank
    kinds += OnlineEstimate, SampledEstimate, ExactEstimate, ValidationEstimate
    for kind in kinds:
        given = {name for in_file, of in objects if of is kind for name in in_file["init_args"]}
        assert given == set(inspect.signature(kind).parameters)


def test_training_from_a_file_and_from_the_one_that_it_saves(tmp_path, monkeypatch):
    """All at once, in a fit; Lightning saves what it was told next to the log, and that can be told again."""
    monkeypatch.chdir(tmp_path)
    fairbatch = {
        "criterion": made("EqualOpportunity", positive_label=1, min_samples=2),
        "groups": ["group"],
        "labels": "targets",
        "rule": made("SignedSteps", alpha=0.02, tolerance=0.01, min_share=0.05, compare="all", pull=0.5),
        "estimate": made("SampledEstimate", samples_per_cell=20),
        "update_every": 6,
        "importance": made("LossRank", pressure=2, decay=0.9),
        "loss": "error",
        "logits": "net",
        "seed": 3,
        "verbose": False,
    }
    callbacks = made("FairBatch", **fairbatch), made("FairnessMonitor", groups="group", stages=["validate"])
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
    runs = [cli(tmp_path / "config.yaml", *callbacks, fit=True, logger=logger).trainer]
    (saved,) = (tmp_path / "logs").rglob("config.yaml")
    runs.append(cli(saved, fit=True).trainer)
    first, second = (callback_of(run, FairBatch).history for run in runs)
    assert len(first) == 4
    assert first[0].gaps.isnan().tolist() == [True, False]
    assert [record.shares_after.tolist() for record in first] == [record.shares_after.tolist() for record in second]
    assert first[-1].shares_after.tolist() != first[0].shares_before.tolist()
    assert [len(callback_of(run, FairnessMonitor).history) for run in runs] == [2, 2]
