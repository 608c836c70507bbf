"""Fair training as a one-line change for PyTorch Lightning.

Names are imported when they are first asked for: only the callbacks need Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairbatch_lightning._support.warn import FairBatchWarning as FairBatchWarning
    from fairbatch_lightning.batches.sampler import FairSampler as FairSampler
    from fairbatch_lightning.callbacks.fairbatch import FairBatch as FairBatch
    from fairbatch_lightning.callbacks.monitor import FairnessMonitor as FairnessMonitor
    from fairbatch_lightning.cells.index import GroupIndex as GroupIndex
    from fairbatch_lightning.measure.estimates.base import CellLosses as CellLosses
    from fairbatch_lightning.measure.estimates.base import Estimate as Estimate
    from fairbatch_lightning.measure.estimates.base import TrainingRun as TrainingRun
    from fairbatch_lightning.measure.estimates.online import OnlineEstimate as OnlineEstimate
    from fairbatch_lightning.measure.estimates.training_set import ExactEstimate as ExactEstimate
    from fairbatch_lightning.measure.estimates.training_set import SampledEstimate as SampledEstimate
    from fairbatch_lightning.measure.estimates.validation import ValidationEstimate as ValidationEstimate
    from fairbatch_lightning.measure.group_loss import GroupLoss as GroupLoss
    from fairbatch_lightning.rules.adaptive import Adaptive as Adaptive
    from fairbatch_lightning.rules.base import Measurement as Measurement
    from fairbatch_lightning.rules.base import RuleState as RuleState
    from fairbatch_lightning.rules.base import UpdateRule as UpdateRule
    from fairbatch_lightning.rules.criteria import Criterion as Criterion
    from fairbatch_lightning.rules.criteria import DemographicParity as DemographicParity
    from fairbatch_lightning.rules.criteria import EqualizedOdds as EqualizedOdds
    from fairbatch_lightning.rules.criteria import EqualOpportunity as EqualOpportunity
    from fairbatch_lightning.rules.importance import Importance as Importance
    from fairbatch_lightning.rules.importance import LossRank as LossRank
    from fairbatch_lightning.rules.signed_steps import SignedSteps as SignedSteps
    from fairbatch_lightning.rules.worst_case import WorstCase as WorstCase

_NAMES_IN = {
    "_support.warn": ("FairBatchWarning",),
    "batches.sampler": ("FairSampler",),
    "callbacks.fairbatch": ("FairBatch",),
    "callbacks.monitor": ("FairnessMonitor",),
    "cells.index": ("GroupIndex",),
    "measure.estimates.base": ("CellLosses", "Estimate", "TrainingRun"),
    "measure.estimates.online": ("OnlineEstimate",),
    "measure.estimates.training_set": ("ExactEstimate", "SampledEstimate"),
    "measure.estimates.validation": ("ValidationEstimate",),
    "measure.group_loss": ("GroupLoss",),
    "rules.adaptive": ("Adaptive",),
    "rules.base": ("Measurement", "RuleState", "UpdateRule"),
    "rules.criteria": ("Criterion", "DemographicParity", "EqualOpportunity", "EqualizedOdds"),
    "rules.importance": ("Importance", "LossRank"),
    "rules.signed_steps": ("SignedSteps",),
    "rules.worst_case": ("WorstCase",),
}
_MODULE_OF = {name: f"fairbatch_lightning.{module}" for module, names in _NAMES_IN.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
