"""Every way people run a Trainer: one table of scenarios, the same assertions for each."""

import contextlib
import dataclasses
import itertools
import warnings
from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Toy, ToyModule, loader, trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.imports import RequirementCache
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from fairbatch_lightning import FairBatch, FairBatchWarning, FairSampler

EPOCHS = 3
ESTIMATES = ["online", pytest.param("exact", marks=pytest.mark.slow)]


# ---- modules --------------------------------------------------------------------------------------------------------


class Base(ToyModule):
    """Splits what a step does into parts that the scenarios replace."""

    def unpack(self, batch):
        return batch[:3]

    def predict(self, x):
        return self(x)

    def training_step(self, batch, batch_idx):
        x, y, index = self.unpack(batch)
        if self.training:
            self.batches.append(index.tolist())
        return self.loss(self.predict(x), y)

    def loss(self, output, y):
        return functional.cross_entropy(output, y)


class Inner(Base):
    def predict(self, x):
        return self.net(x)


class DirectForward(Base):
    """`self.forward(x)` fires no hook of the module, but one of the submodule."""

    def predict(self, x):
        return self.forward(x)


class Returns(Inner):
    def training_step(self, batch, batch_idx):
        x, y, index = self.unpack(batch)
        if self.training:
            self.batches.append(index.tolist())
        logits = self.net(x)
        return {"loss": self.loss(logits, y), "logits": logits}


class Binary(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def loss(self, output, y):
        return functional.binary_cross_entropy_with_logits(output.flatten(), y.to(output.dtype))


class FlatBinary(Binary):
    def forward(self, x):
        return self.net(x).flatten()


class DictOutput(Base):
    def forward(self, x):
        return {"logits": self.net(x), "features": x}

    def loss(self, output, y):
        return super().loss(output["logits"], y)


class ObjectOutput(Base):
    """As Hugging Face models return it."""

    def forward(self, x):
        return SimpleNamespace(logits=self.net(x), hidden_states=None)

    def loss(self, output, y):
        return super().loss(output.logits, y)


WithAux = namedtuple("WithAux", ["logits", "aux_logits2", "aux_logits1"])


class AuxOutput(Base):
    """As torchvision's GoogLeNet does: other heads while training, a plain tensor in evaluation."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(4, 2)

    def forward(self, x):
        return WithAux(self.net(x), None, self.aux(x)) if self.training else self.net(x)

    def loss(self, output, y):
        return super().loss(output.logits, y) + 0.3 * super().loss(output.aux_logits1, y)


class ForDicts(Base):
    def unpack(self, batch):
        return batch["x"], batch["y"], batch["index"]


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    index: torch.Tensor


class ForDataclasses(Base):
    def unpack(self, batch):
        return batch.x, batch.y, batch.index


class WithoutBatchIndex(Base):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Manual(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TwoOptimizers(Manual):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.net(x) + self.bias

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = Base.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD([self.bias], 0.1)


class WithLBFGS(Base):
    def training_step(self, batch, batch_idx):
        if self.training and len(self.batches) and self.batches[-1] == batch[2].tolist():
            self.batches.pop()  # LBFGS runs a step several times
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class DataLoaderIter(Base):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class CompiledInside(Base):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class CompiledInPlace(Base):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="eager")


class Validated(Base):
    def validation_step(self, batch, batch_idx):
        x, y, _ = self.unpack(batch)
        self.log("val_loss", functional.cross_entropy(self(x), y))


class Finetuned(Base):
    def __init__(self):
        super().__init__()
        self.backbone, self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2)

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


class Two(Base):
    """Trains on two loaders at once; the first is the fair one."""

    def unpack(self, batch):
        fair = batch["fair"] if isinstance(batch, dict) else batch[0]
        return fair[:3]

    def training_step(self, batch, batch_idx):
        other = batch["other"] if isinstance(batch, dict) else batch[1]
        return super().training_step(batch, batch_idx) + 0 * self.net(other[0]).sum()


# ---- data -----------------------------------------------------------------------------------------------------------


def as_dict(samples):
    x, y, index = default_collate(samples)
    return {"x": x, "y": y, "index": index}


def as_dataclass(samples):
    return Sample(*default_collate(samples))


class MyLoader(DataLoader):
    """A subclass with an argument that Lightning's re-instantiation does not know."""

    def __init__(self, secret, dataset):
        super().__init__(dataset, batch_size=20, shuffle=True)
        self.secret = secret

    def __iter__(self):
        assert self.secret == 42
        return super().__iter__()


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return DataLoader(Toy(), batch_size=40)


class OwnLoader(Base):
    def train_dataloader(self):
        return loader()


def stateful():
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Toy(), batch_size=20, shuffle=True)


def other_loader():
    return DataLoader(Toy(seed=1), batch_size=30)


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass
class Scenario:
    """How to run a Trainer, and what of it differs from the plain run."""

    module: Any = Base
    data: Any = loader
    fit: Any = None
    """Other arguments of `fit`, from the data."""
    trainer: dict = field(default_factory=dict)
    fairbatch: dict = field(default_factory=dict)
    callbacks: Any = list
    needs: str = "lightning"
    search: int = 0
    """Batches that are trained on before the training itself."""
    batches: int = 12
    """Batches per epoch."""
    epochs: int = EPOCHS
    warns: str | None = None
    same_shares: bool = True
    """Whether the model is the plain run's, so that shares must move as they do there."""


S = Scenario
SCENARIOS = {
    "loader": S(),
    "datamodule": S(data=Data, fit=lambda data: {"datamodule": data}),
    "module's loader": S(module=OwnLoader, data=None, fit=lambda data: {}),
    "validation loader is the same object": S(
        Validated, fit=lambda data: {"train_dataloaders": data, "val_dataloaders": data}
    ),
    "list of loaders": S(Two, lambda: [loader(), other_loader()], fairbatch={"loader": 0}, same_shares=False),
    "dict of loaders": S(
        Two, lambda: {"other": other_loader(), "fair": loader()}, fairbatch={"loader": "fair"}, same_shares=False
    ),
    "CombinedLoader": S(
        Two,
        lambda: CombinedLoader({"fair": loader(), "other": loader()}, "min_size"),
        fairbatch={"loader": "fair"},
        same_shares=False,
    ),
    "custom collate_fn, dict": S(ForDicts, lambda: loader(collate_fn=as_dict)),
    "dataclass": S(ForDataclasses, lambda: loader(collate_fn=as_dataclass)),
    "custom batch_sampler": S(
        data=lambda: DataLoader(
            Toy(), batch_sampler=type("Mine", (BatchSampler,), {})(RandomSampler(Toy()), 20, False)
        ),
        warns="replaces your Mine",
    ),
    "DataLoader subclass": S(data=lambda: MyLoader(42, Toy())),
    "StatefulDataLoader": S(data=stateful),
    "workers": S(data=lambda: loader(num_workers=2)),
    "persistent workers": S(data=lambda: loader(num_workers=2, persistent_workers=True)),
    "pin_memory": S(data=lambda: loader(pin_memory=True)),
    "self.net(x)": S(Inner, fairbatch={"logits": "net"}),
    "self.forward(x)": S(DirectForward, fairbatch={"logits": "net"}),
    "returned logits": S(Returns),
    "no batch_idx": S(WithoutBatchIndex),
    "dataloader_iter": S(DataLoaderIter),
    "head (B, 1)": S(Binary, same_shares=False),
    "head (B,)": S(FlatBinary, same_shares=False),
    "dict output": S(DictOutput),
    "object output": S(ObjectOutput),
    "GoogLeNet output": S(AuxOutput, same_shares=False),
    "gradient accumulation": S(trainer={"accumulate_grad_batches": 3}, same_shares=False),
    "manual optimization": S(Manual),
    "two optimizers": S(TwoOptimizers, same_shares=False),
    "LBFGS": S(WithLBFGS, same_shares=False),
    "bf16-mixed": S(trainer={"precision": "bf16-mixed"}),
    "bf16-true": S(trainer={"precision": "bf16-true"}, same_shares=False),
    "64-true": S(trainer={"precision": "64-true"}),
    "compiled net": S(CompiledInside),
    "net compiled in place": S(CompiledInPlace),
    "compiled net, named": S(type("C", (CompiledInside, Inner), {}), fairbatch={"logits": "net"}),
    "net compiled in place, named": S(type("D", (CompiledInPlace, Inner), {}), fairbatch={"logits": "net"}),
    "compiled module": S(lambda: torch.compile(Base(), backend="eager")),
    "limit_train_batches": S(trainer={"limit_train_batches": 5}, batches=5, same_shares=False),
    "fast_dev_run": S(trainer={"fast_dev_run": 2}, batches=2, epochs=1, same_shares=False),
    "max_steps": S(trainer={"max_steps": 24, "max_epochs": -1}, epochs=2),
    "val_check_interval": S(Validated, Data, lambda data: {"datamodule": data}, {"val_check_interval": 5}),
    "reload_dataloaders": S(
        data=Data, fit=lambda d: {"datamodule": d}, trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "barebones": S(trainer={"barebones": True, **dict.fromkeys(("logger", "enable_checkpointing"), None)}),
    "ModelCheckpoint": S(
        callbacks=lambda: [ModelCheckpoint(monitor="fairbatch/gap_max", save_on_train_epoch_end=True)],
        trainer={"enable_checkpointing": True},
    ),
    "EarlyStopping": S(callbacks=lambda: [EarlyStopping("fairbatch/gap_max", patience=9)]),
    "EarlyStopping with validation": S(
        Validated,
        Data,
        lambda data: {"datamodule": data},
        callbacks=lambda: [EarlyStopping("fairbatch/gap_max", patience=9, check_on_train_epoch_end=True)],
    ),
    "StochasticWeightAveraging": S(
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)], same_shares=False
    ),
    "WeightAveraging": S(
        callbacks=lambda: [pytest.importorskip("lightning.pytorch.callbacks.weight_averaging").EMAWeightAveraging()]
    ),
    "BackboneFinetuning": S(
        Finetuned,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)],
        same_shares=False,
    ),
    "LearningRateFinder": S(
        callbacks=lambda: [LearningRateFinder(num_training_steps=15, update_attr=False)],
        search=15,
        needs="lightning>=2.6",  # older ones go on with what the search left of its loader, with or without FairBatch
    ),
    "update_every": S(fairbatch={"update_every": 5}, same_shares=False),
    "update_every with workers": S(
        data=lambda: loader(num_workers=2), fairbatch={"update_every": 5}, same_shares=False
    ),
}


def new_fairbatch(**arguments):
    return FairBatch(groups="group", alpha=0.05, **arguments)


def state_of(loaders):
    """Return the attributes of all loaders that a user gave, without what Lightning itself adds to them."""
    found = loaders.flattened if isinstance(loaders, CombinedLoader) else loaders
    found = found.values() if isinstance(found, dict) else found if isinstance(found, list) else [found]
    return [
        {name: value for name, value in vars(one).items() if not name.startswith("__") and name != "worker_init_fn"}
        for one in found
        if isinstance(one, DataLoader)
    ]


@pytest.fixture(scope="module")
def plain_runs():
    """The history of a plain run, for each estimate."""
    return {estimate: plain_history(estimate) for estimate in ("online", "exact")}


def plain_history(estimate):
    callback, module = new_fairbatch(estimate=estimate), Base()
    trainer(callback, max_epochs=EPOCHS).fit(module, loader())
    return callback.history


def expected_batches(history, scenario, ahead):
    """Return what the sampler draws when shares change as the history says."""
    sampler = FairSampler(Toy().targets, Toy().group, 20, drop_last=False)
    every = scenario.fairbatch.get("update_every")
    batches = []
    for epoch in range(scenario.epochs):
        sampler.set_epoch(epoch)
        stream, drawn = sampler.batches(), []
        for number in range(scenario.batches):
            while len(drawn) <= min(number + ahead, scenario.batches - 1):
                drawn.append(next(stream))
            batches.append(drawn[number])
            if every and len(batches) % every == 0:
                sampler.shares = history[len(batches) // every - 1].shares_after
        if not every:
            sampler.shares = history[epoch].shares_after
    return batches


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, estimate, plain_runs, tmp_path):
    scenario = SCENARIOS[name]
    if not (met := RequirementCache(scenario.needs)):
        pytest.skip(str(met))
    callback, module = new_fairbatch(estimate=estimate, **scenario.fairbatch), scenario.module()
    data = scenario.data() if scenario.data else None
    before = state_of(data)
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "default_root_dir": tmp_path, **scenario.trainer}
    options = {key: value for key, value in options.items() if value is not None}
    run = trainer(callback, *scenario.callbacks(), **{**options, **none_of(scenario.trainer)})
    arguments = scenario.fit(data) if scenario.fit else {"train_dataloaders": data}
    with pytest.warns(FairBatchWarning, match=scenario.warns) if scenario.warns else no_warning_of_ours():
        run.fit(module, **arguments)
    module = getattr(module, "_orig_mod", module)

    every = scenario.fairbatch.get("update_every")
    total = scenario.batches * scenario.epochs
    assert len(callback.history) == (total // every if every else scenario.epochs)
    workers = 2 * 2 if "update_every with workers" in name else 0
    assert module.batches[scenario.search :] == expected_batches(callback.history, scenario, ahead=workers)
    if scenario.same_shares:
        for record, expected in zip(callback.history, plain_runs[estimate], strict=False):
            torch.testing.assert_close(record.shares_after, expected.shares_after)
    assert not torch.equal(callback.shares, callback.history[0].shares_before) or name == "fast_dev_run"

    assert state_of(data) == before
    assert not any(part._forward_hooks for part in module.modules())
    assert "dataloader" not in vars(run.fit_loop._data_source)
    assert not {"log", "log_dict"} & set(vars(module))


WITH_OTHER_UPDATES = ["update_every", "update_every with workers", "val_check_interval", "fast_dev_run", "max_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WITH_OTHER_UPDATES])
def test_scenario_with_validation(name, tmp_path):
    """The losses come from the validation, whatever the training is like."""
    scenario = SCENARIOS[name]
    if not (met := RequirementCache(scenario.needs)):
        pytest.skip(str(met))
    callback, module = new_fairbatch(estimate="validation", **scenario.fairbatch), scenario.module()
    inner = getattr(module, "_orig_mod", module)
    inner.__class__ = type(type(inner).__name__, (type(inner),), {"validation_step": validation_step})
    data = scenario.data() if scenario.data else None
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "default_root_dir": tmp_path, **scenario.trainer}
    run = trainer(callback, *scenario.callbacks(), **options)
    arguments = scenario.fit(data) if scenario.fit else {"train_dataloaders": data}
    if "datamodule" not in arguments:
        collate = scenario.data().collate_fn if name in ("custom collate_fn, dict", "dataclass") else None
        arguments["val_dataloaders"] = DataLoader(Toy(seed=2), batch_size=50, collate_fn=collate)
    with pytest.warns(FairBatchWarning, match=scenario.warns) if scenario.warns else no_warning_of_ours():
        run.fit(module, **arguments)
    assert len(callback.history) == EPOCHS
    assert inner.batches[scenario.search :] == expected_batches(callback.history, scenario, ahead=0)
    assert all(record.losses.isfinite().all() for record in callback.history)


def validation_step(self, batch, batch_idx):
    """Call the model as the training does."""
    if isinstance(self, Two):
        batch = [batch, batch]
    logits = self.predict(self.unpack(batch)[0])
    return {"logits": logits} if isinstance(self, Returns) else None


def none_of(options):
    """Return the options that a scenario leaves to the Trainer's default."""
    return {key: None for key, value in options.items() if value is None}


@contextlib.contextmanager
def no_warning_of_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FairBatchWarning)
        yield


def test_updates_reach_training_after_what_workers_have_fetched():
    """num_workers * prefetch_factor batches are under way; the scenario above pins the number for two workers."""
    scenario = dataclasses.replace(SCENARIOS["update_every with workers"])
    callback, module = new_fairbatch(update_every=5), Base()
    trainer(callback, max_epochs=EPOCHS).fit(module, loader(num_workers=1, prefetch_factor=3))
    assert module.batches == expected_batches(callback.history, scenario, ahead=3)


def test_batch_size_finder_rebuilds_the_loader(tmp_path):
    class Sized(L.LightningDataModule):
        batch_size = 2

        def train_dataloader(self):
            return loader(batch_size=self.batch_size)

    callback, module, data = new_fairbatch(), Base(), Sized()
    finder = BatchSizeFinder(max_trials=4, steps_per_trial=2)
    trainer(callback, finder, max_epochs=1, default_root_dir=tmp_path).fit(module, datamodule=data)
    assert data.batch_size >= 16
    epoch = module.batches[-240 // data.batch_size :]
    assert {len(batch) for batch in epoch} == {data.batch_size}
    assert set(itertools.chain(*epoch)) == set(range(240))
    assert len(callback.history) == 1


def test_early_stopping_stops():
    callback = new_fairbatch()
    run = trainer(callback, EarlyStopping("fairbatch/gap_max", stopping_threshold=9.9), max_epochs=5)
    run.fit(Base(), loader())
    assert len(callback.history) == 1


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ["exact", "online"])
@pytest.mark.parametrize("name", ["module", "net"])
def test_training_is_compiled_as_often_as_without(name, estimate):
    """A hook that changes between steps would have everything compiled again."""

    def graphs(*callbacks):
        torch._dynamo.reset()
        compiled = []

        def backend(graph, inputs):
            compiled.append(torch.is_grad_enabled())
            return graph.forward

        module = Base() if name == "module" else Inner()
        if name == "net":
            module.net.compile(backend=backend)
        else:
            module = torch.compile(module, backend=backend)
        trainer(*callbacks, max_epochs=3).fit(module, loader())
        return sum(compiled)

    callback = new_fairbatch(logits="net" if name == "net" else None, estimate=estimate)
    assert graphs(callback) == graphs() > 0
    assert len(callback.history) == 3


def test_another_model_with_the_same_callback():
    callback, expected = new_fairbatch(), new_fairbatch()
    trainer(callback, max_epochs=2).fit(Binary(), loader())
    first, second = Base(), Base()
    trainer(callback, max_epochs=2).fit(first, loader())
    trainer(expected, max_epochs=2).fit(second, loader())
    assert first.batches == second.batches
    assert torch.equal(callback.shares, expected.shares)


def test_validate_test_and_predict_are_untouched():
    class All(Validated):
        def test_step(self, batch, batch_idx):
            self.seen = [*getattr(self, "seen", []), *batch[2].tolist()]

        def predict_step(self, batch, batch_idx):
            return batch[2]

    module, run = All(), trainer(new_fairbatch(), max_epochs=1)
    run.fit(module, loader(), DataLoader(Toy(), batch_size=40))
    run.validate(module, DataLoader(Toy(), batch_size=40), verbose=False)
    run.test(module, DataLoader(Toy(), batch_size=40), verbose=False)
    assert module.seen == list(range(240))
    predicted = run.predict(module, DataLoader(Toy(), batch_size=40))
    assert torch.cat(predicted).tolist() == list(range(240))


def test_command_line_configures_it(tmp_path):
    from lightning.pytorch.cli import LightningCLI

    config = tmp_path / "config.yaml"
    config.write_text(
        """
        seed_everything: false
        trainer:
          max_epochs: 2
          accelerator: cpu
          logger: false
          enable_checkpointing: false
          enable_progress_bar: false
          callbacks:
            - class_path: fairbatch_lightning.FairBatch
              init_args:
                criterion: equal_opportunity
                groups: [group]
                alpha: 0.02
                threshold: 0.01
                min_share: 0.05
                compare: all
                positive_label: 1
                loss: error
                update_every: epoch
                seed: 3
        """
    )
    cli = LightningCLI(Base, Data, args=["fit", "--config", str(config)], save_config_callback=None)
    callback = next(c for c in cli.trainer.callbacks if isinstance(c, FairBatch))
    assert len(callback.history) == 2
    assert callback.history[0].gaps.isnan().tolist() == [True, False]
