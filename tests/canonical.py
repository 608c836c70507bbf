"""The canonical callbacks and the canonical ways to run a Trainer: one table each, for the tests in pipeline/."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import Toy, loader
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from modules import (
    AuxOutput,
    Base,
    Binary,
    CompiledInPlace,
    CompiledInside,
    Data,
    DataLoaderIter,
    DictOutput,
    DirectForward,
    Finetuned,
    FlatBinary,
    ForDataclasses,
    ForDicts,
    Inner,
    Manual,
    MyLoader,
    ObjectOutput,
    OwnLoader,
    Returns,
    Two,
    TwoOptimizers,
    Validated,
    WithLBFGS,
    WithoutBatchIndex,
    as_dataclass,
    as_dict,
    other_loader,
    stateful,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from fairbatch_lightning import FairBatch, SignedSteps, WorstCase
from fairbatch_lightning.callbacks.baselines import (
    AdversarialDebiasing,
    Boosting,
    Cutting,
    FairnessConstraints,
    GroupDRO,
    Resampling,
    Reweighing,
)


def new_fairbatch(criterion="equalized_odds", alpha=0.05, **arguments):
    """Return FairBatch with the paper's rule, and a step that shows within a few epochs."""
    return FairBatch(criterion, groups="group", **{"rule": SignedSteps(alpha=alpha), **arguments})


CALLBACKS = {
    "the bare line": lambda **settings: FairBatch("equalized_odds", groups="group", **settings),
    "online": new_fairbatch,
    "sampled": lambda **settings: new_fairbatch(estimate="sampled", **settings),
    "exact": lambda **settings: new_fairbatch(estimate="exact", **settings),
    "equal opportunity": lambda **settings: new_fairbatch("equal_opportunity", **settings),
    "demographic parity": lambda **settings: new_fairbatch("demographic_parity", **settings),
    "update_every": lambda **settings: new_fairbatch(update_every=5, **settings),
    "importance": lambda **settings: new_fairbatch(importance="loss", **settings),
    "worst case": lambda **settings: new_fairbatch(rule=WorstCase(alpha=0.5), **settings),
    "cutting": lambda **settings: Cutting(groups="group", **settings),
    "boosting": lambda **settings: Boosting(groups="group", **settings),
    "reweighing": lambda **settings: Reweighing(groups="group", **settings),
    "resampling": lambda **settings: Resampling(groups="group", **settings),
    "group dro": lambda **settings: GroupDRO(groups="group", step_size=0.5, **settings),
    "constraints": lambda **settings: FairnessConstraints(groups="group", **settings),
    "adversary": lambda **settings: AdversarialDebiasing("equal_opportunity", groups="group", lr=0.05, **settings),
}
"""Every callback that changes batches, with the settings that change how it goes through a training."""

EPOCHS = 3


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
