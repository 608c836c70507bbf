"""What FairBatch is compared with, as callbacks of the same shape.

In: a Trainer, and what FairBatch takes. Out: the same training, made fair in another way. One file each; `base.py` and
`loss_changing.py` are what they share.
"""

from fairbatch_lightning.callbacks.baselines.adversarial import AdversarialDebiasing as AdversarialDebiasing
from fairbatch_lightning.callbacks.baselines.base import ForCriterion as ForCriterion
from fairbatch_lightning.callbacks.baselines.constraints import FairnessConstraints as FairnessConstraints
from fairbatch_lightning.callbacks.baselines.group_dro import GroupDRO as GroupDRO
from fairbatch_lightning.callbacks.baselines.loss_changing import LossChanging as LossChanging
from fairbatch_lightning.callbacks.baselines.resampling import Boosting as Boosting
from fairbatch_lightning.callbacks.baselines.resampling import Cutting as Cutting
from fairbatch_lightning.callbacks.baselines.reweighing import Resampling as Resampling
from fairbatch_lightning.callbacks.baselines.reweighing import Reweighing as Reweighing
