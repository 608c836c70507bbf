"""What FairBatch is compared with, as callbacks of the same shape."""

from fairbatch_lightning.baselines.adversarial import AdversarialDebiasing
from fairbatch_lightning.baselines.base import Baseline, ForCriterion
from fairbatch_lightning.baselines.constraints import FairnessConstraints
from fairbatch_lightning.baselines.loss_changing import LossChanging
from fairbatch_lightning.baselines.resampling import Boosting, Cutting
from fairbatch_lightning.baselines.reweighing import Resampling, Reweighing
from fairbatch_lightning.baselines.robust import FairDRO, GroupDRO

__all__ = [
    "AdversarialDebiasing",
    "Baseline",
    "Boosting",
    "Cutting",
    "FairDRO",
    "FairnessConstraints",
    "ForCriterion",
    "GroupDRO",
    "LossChanging",
    "Resampling",
    "Reweighing",
]
