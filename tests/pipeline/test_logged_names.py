"""Every logged name can be a file: some loggers, such as MLflow's, keep one for each, in folders that slashes make."""

import pytest
from canonical import CALLBACKS
from evaluated import Evaluated, held_out
from helpers import Toy, loader, trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from fairbatch_lightning import FairBatch, FairnessMonitor
from fairbatch_lightning.reports.log_format import log_name, parts_of

LABELS, GROUPS = ["no", "no/yes"], ["a", "a/b", ""]


class Names(CSVLogger):
    """Keeps the names of all that is logged."""

    def __init__(self, folder):
        super().__init__(folder)
        self.names = set()

    def log_metrics(self, metrics, step=None):
        self.names |= set(metrics)
        super().log_metrics(metrics, step)


class Pictures(TensorBoardLogger):
    """Keeps the names of pictures."""

    def __init__(self, folder):
        super().__init__(folder)
        self.names = set()

    @property
    def experiment(self):
        return self

    def add_figure(self, name, figure, step):
        self.names.add(name)

    def log_metrics(self, metrics, step=None):
        self.names |= set(metrics)

    def save(self):
        """Write no file."""

    def finalize(self, status):
        """Write no file."""


def named(seed=0):
    """Return data whose labels and groups have names that could be mistaken for folders."""
    data = Toy(seed=seed)
    data.group = [GROUPS[z] for z in data.group_ids]
    data.label = [LABELS[y] for y in data.targets]
    return data


def logged(folder, callback):
    """Return all names that a training and a test log."""
    loggers = Names(folder), Pictures(folder)
    monitors = (FairnessMonitor(groups="group", labels="label", name=name) for name in (None, "val", "a/b"))
    run = trainer(callback, *monitors, max_epochs=1, logger=loggers, log_every_n_steps=1)
    model = Evaluated()
    run.fit(model, loader(named()), [held_out(named(1)), held_out(named(2))])
    run.test(model, held_out(named(3)), verbose=False)
    return set.union(*(logger.names for logger in loggers))


ONE_OF_EACH_KIND = list({type(make()): name for name, make in CALLBACKS.items()}.values())


@pytest.mark.parametrize("method", ONE_OF_EACH_KIND)
def test_no_name_is_a_folder_of_another(method, tmp_path):
    callback = CALLBACKS[method](labels="label")
    names = logged(tmp_path / "logs", callback)
    assert {"fairness/val_1/accuracy", "fairness_val/test/group_accuracy/a%2Fb"} <= names
    assert ("fairbatch/gap/no%2Fyes" in names) == isinstance(callback, FairBatch)
    store = tmp_path / "store"
    for name in sorted(names):
        assert all(part.strip(".") for part in name.split("/")), name
        file = store / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)


@pytest.mark.parametrize("part", ["", ".", "..", "%empty", "a.b", "%2E"])
def test_names_that_mean_something_in_a_path(part):
    name = log_name("fairbatch", part, "x")
    assert parts_of(name) == ("fairbatch", part, "x")
    assert name.split("/")[1].strip(".")
