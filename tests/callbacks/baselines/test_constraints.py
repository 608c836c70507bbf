"""Fairness constraints, against the penalty computed by hand."""

import numpy as np
import pytest
import torch
from baseline_methods import Replayed
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional

from fairbatch_lightning import DemographicParity, EqualOpportunity
from fairbatch_lightning.callbacks.baselines import FairnessConstraints
from fairbatch_lightning.callbacks.baselines.constraints import covariances, log_odds


def rates(module, toy):
    """Return the rates of positive predictions of the groups."""
    with torch.no_grad():
        positive = module(toy.x).argmax(1).double()
    return torch.stack([positive[toy.group_ids == z].mean() for z in range(3)])


def test_covariances_are_numpys():
    random = np.random.default_rng(0)
    values, groups = random.normal(size=50), random.integers(3, size=50)
    expected = [np.cov(values, groups == z, ddof=0)[0, 1] for z in range(3)]
    assert covariances(torch.tensor(values), torch.tensor(groups), 3).numpy() == pytest.approx(np.array(expected))


def test_log_odds_of_classes_are_those_of_probabilities():
    logits, classes = torch.randn(20, 4, dtype=torch.float64), torch.randint(4, (20,))
    probability = logits.softmax(1)[torch.arange(20), classes]
    torch.testing.assert_close(log_odds(logits, classes), torch.log(probability / (1 - probability)))
    single = torch.randn(20)
    both = torch.stack([torch.zeros(20), single], 1)
    torch.testing.assert_close(log_odds(single, classes % 2), log_odds(both, classes % 2))


@pytest.mark.parametrize(
    ("criterion", "parts"),
    [
        ("equalized_odds", [0, 1]),
        ("equal_opportunity", [1]),
        (EqualOpportunity(positive_label=0), [0]),
        ("demographic_parity", [None]),
        (DemographicParity(positive_label=0), [None]),
    ],
    ids=str,
)
def test_steps_are_those_of_the_penalised_loss(criterion, parts):
    module = Replayed()
    trainer(FairnessConstraints(criterion, groups="group", weight=0.7), max_epochs=1).fit(module, loader())

    def penalised(logits, y, z):
        margin = logits[:, 1] - logits[:, 0]
        loss = functional.cross_entropy(logits, y)
        for label in parts:
            among = slice(None) if label is None else y == label
            value = margin[among] if label is None else ((2 * label - 1) * margin[among]).clamp(max=0)
            for group in range(3):
                member = (z[among] == group).float()
                loss = loss + 0.7 * ((member - member.mean()) * value).mean().abs()
        return loss

    module.replay(penalised)


def test_makes_decisions_independent_of_the_group():
    toy, spreads = Toy(), []
    for weight in (0.0, 5.0):
        module = ToyModule()
        callback = FairnessConstraints("demographic_parity", groups="group", weight=weight)
        trainer(callback, max_epochs=30).fit(module, loader(toy, batch_size=60))
        spreads.append(float(rates(module, toy).max() - rates(module, toy).min()))
    assert spreads[1] < 0.7 * spreads[0]


def test_more_than_two_labels():
    """Equal opportunity is then about each of them, which is equalized odds; demographic parity has to be told."""
    toy, modules = Toy(num_labels=3), []
    for criterion in ("equal_opportunity", "equalized_odds"):
        modules.append(ToyModule(num_labels=3))
        trainer(FairnessConstraints(criterion, groups="group"), max_epochs=1).fit(modules[-1], loader(toy))
    assert torch.equal(modules[0].net.weight, modules[1].net.weight)
    with pytest.raises(ValueError, match=r"`positive_label` for demographic parity, .* the 3 labels \[0, 1, 2\]"):
        trainer(FairnessConstraints("demographic_parity", groups="group")).fit(ToyModule(num_labels=3), loader(toy))


def test_bad_input():
    with pytest.raises(ValueError, match="`weight` to be a number of at least 0 but got -1"):
        FairnessConstraints(groups="group", weight=-1)
