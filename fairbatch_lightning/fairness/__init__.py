"""Fairness: from predictions to how unfair they are, and how sure that is.

In: predictions, or counts of them. Out: disparities with intervals, as torchmetrics and as audits. Open
`disparities.py` first: the formulas; `counts.py` counts, `audit.py` puts it all together.
"""

from fairbatch_lightning.fairness.audit import Audit as Audit
from fairbatch_lightning.fairness.audit import FairnessRecord as FairnessRecord
from fairbatch_lightning.fairness.counts import GroupConfusion as GroupConfusion
from fairbatch_lightning.fairness.metrics import DemographicParityDisparity as DemographicParityDisparity
from fairbatch_lightning.fairness.metrics import EqualizedOddsDisparity as EqualizedOddsDisparity
from fairbatch_lightning.fairness.metrics import EqualOpportunityDisparity as EqualOpportunityDisparity
from fairbatch_lightning.fairness.metrics import GroupAccuracy as GroupAccuracy
