"""What baselines take for a criterion: those that they know how to follow, by name or as an object."""

from dataclasses import dataclass

import pytest
import torch
from helpers import ToyModule, loader, trainer

from fairbatch_lightning import Criterion, DemographicParity, EqualizedOdds, EqualOpportunity
from fairbatch_lightning.callbacks.baselines import AdversarialDebiasing, Boosting, Cutting, FairnessConstraints

DEPENDENT = [Cutting, Boosting, FairnessConstraints, AdversarialDebiasing]


@dataclass(frozen=True)
class Own(Criterion):
    """A criterion that no baseline knows."""

    min_samples: int = 1

    def signal(self, losses, index):
        return losses


@pytest.mark.parametrize("baseline", DEPENDENT)
@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("equalized_odds", EqualizedOdds()),
        ("equal_opportunity", EqualOpportunity(positive_label=1)),
        ("demographic_parity", DemographicParity(positive_label=1)),
    ],
)
def test_name_and_object_are_the_same(baseline, name, same):
    modules = [ToyModule(), ToyModule()]
    for module, criterion in zip(modules, (name, same), strict=True):
        trainer(baseline(criterion, groups="group"), max_epochs=1).fit(module, loader())
    assert modules[0].batches == modules[1].batches
    assert torch.equal(modules[0].net.weight, modules[1].net.weight)


@pytest.mark.parametrize("baseline", DEPENDENT)
def test_equalized_odds_is_the_default(baseline):
    assert baseline(groups="group").criterion == EqualizedOdds()


@pytest.mark.parametrize("baseline", DEPENDENT)
@pytest.mark.parametrize("criterion", ["fair", ["race"], None, EqualizedOdds])
def test_what_is_no_criterion_is_refused(baseline, criterion):
    with pytest.raises(ValueError, match=r"an object of Criterion but got .*(fair|race|None|Odds)"):
        baseline(criterion)


@pytest.mark.parametrize("baseline", DEPENDENT)
@pytest.mark.parametrize(
    "criterion", [Own(), EqualizedOdds(min_samples=2), EqualOpportunity(1, min_samples=20)], ids=str
)
def test_what_a_baseline_cannot_follow_is_refused(baseline, criterion):
    expected = rf"`criterion` of {baseline.__name__} to be one of .* `positive_label`, but got (Own|Equal)"
    with pytest.raises(ValueError, match=expected):
        baseline(criterion)


@pytest.mark.parametrize("baseline", DEPENDENT)
def test_a_positive_label_that_the_data_lacks_is_refused(baseline):
    callback = baseline(EqualOpportunity(positive_label="hired"), groups="group")
    with pytest.raises(ValueError, match=r"`positive_label` to be one of the data's labels \[0, 1\] but got 'hired'"):
        trainer(callback).fit(ToyModule(), loader())
