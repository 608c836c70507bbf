"""Fair training as a one-line change for PyTorch Lightning."""

from fairbatch_lightning._warnings import FairBatchWarning as FairBatchWarning
from fairbatch_lightning.audit import Audit as Audit
from fairbatch_lightning.audit import FairnessRecord as FairnessRecord
from fairbatch_lightning.callback import FairBatch as FairBatch
from fairbatch_lightning.controller import ShareController as ShareController
from fairbatch_lightning.criteria import Criterion as Criterion
from fairbatch_lightning.criteria import DemographicParity as DemographicParity
from fairbatch_lightning.criteria import EqualizedOdds as EqualizedOdds
from fairbatch_lightning.criteria import EqualOpportunity as EqualOpportunity
from fairbatch_lightning.estimate import Estimate as Estimate
from fairbatch_lightning.evaluated import ExactEstimate as ExactEstimate
from fairbatch_lightning.evaluated import SampledEstimate as SampledEstimate
from fairbatch_lightning.fairness import DemographicParityDisparity as DemographicParityDisparity
from fairbatch_lightning.fairness import EqualizedOddsDisparity as EqualizedOddsDisparity
from fairbatch_lightning.fairness import EqualOpportunityDisparity as EqualOpportunityDisparity
from fairbatch_lightning.fairness import GroupAccuracy as GroupAccuracy
from fairbatch_lightning.groups import GroupIndex as GroupIndex
from fairbatch_lightning.history import UpdateRecord as UpdateRecord
from fairbatch_lightning.importance import Importance as Importance
from fairbatch_lightning.importance import LossRank as LossRank
from fairbatch_lightning.metrics import GroupConfusion as GroupConfusion
from fairbatch_lightning.metrics import GroupLoss as GroupLoss
from fairbatch_lightning.monitor import FairnessMonitor as FairnessMonitor
from fairbatch_lightning.online import OnlineEstimate as OnlineEstimate
from fairbatch_lightning.sampler import FairSampler as FairSampler
from fairbatch_lightning.validation import ValidationEstimate as ValidationEstimate
