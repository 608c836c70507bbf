"""Adversarial debiasing: the adversary learns, and the model forgets the group."""

import pytest
import torch
from helpers import Toy, ToyModule, loader, trainer

from fairbatch_lightning import EqualOpportunity
from fairbatch_lightning.callbacks.baselines import AdversarialDebiasing, FairnessConstraints


class Guessable(Toy):
    """The group is the third feature, which is no use for the label but goes together with it."""

    def __init__(self, num_samples=600, seed=0):
        super().__init__(num_samples, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        same = torch.rand(num_samples, generator=generator) < 0.8
        self.group_ids = torch.where(same, self.targets, 1 - self.targets)
        self.group = [("a", "b")[i] for i in self.group_ids]
        self.x[:, 2] = 2.0 * self.group_ids - 1


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["equalized_odds", "equal_opportunity", "demographic_parity"])
def test_the_model_forgets_the_group(criterion):
    dependence = []
    for weight in (0.0, 1.0):
        module, toy = ToyModule(lr=0.05), Guessable()
        callback = AdversarialDebiasing(criterion, groups="group", weight=weight, lr=0.02)
        trainer(callback, max_epochs=40).fit(module, loader(toy, batch_size=60))
        margin = module.net.weight[1] - module.net.weight[0]
        dependence.append(abs(float(margin[2])))
    assert dependence[1] < 0.5 * dependence[0]


def test_the_adversary_learns():
    module, toy = ToyModule(), Guessable()
    callback = AdversarialDebiasing("demographic_parity", groups="group", weight=0.0, lr=0.02)
    trainer(callback, max_epochs=20).fit(module, loader(toy))
    with torch.no_grad():
        guesses = callback.adversary(module(toy.x)).argmax(1)
    assert (guesses == toy.group_ids).double().mean() > 0.75


def test_without_weight_it_is_ordinary_training():
    """On the same batches, and with the same random numbers, as with a penalty of no weight."""
    found = []
    for method in (AdversarialDebiasing, FairnessConstraints):
        module = ToyModule()
        trainer(method(groups="group", weight=0.0), max_epochs=2).fit(module, loader())
        found.append((module.net.weight, torch.rand(1)))
    torch.testing.assert_close(*found)


def test_the_adversary_learns_nothing_from_a_batch_without_positives():
    class Few(Toy):
        def __init__(self):
            super().__init__(60)
            self.targets[:] = 0
            self.targets[:2] = 1
            self.group = ["a", "b"] * 30

    changes = []

    class Watch(AdversarialDebiasing):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            before = [weight.clone() for weight in self.adversary.parameters()]
            super().on_train_batch_end(run, module, outputs, batch, batch_idx)
            same = all(torch.equal(*pair) for pair in zip(before, self.adversary.parameters(), strict=True))
            changes.append((bool((batch[1] == 1).any()), not same))

    callback = Watch("equal_opportunity", groups="group", lr=0.1)
    trainer(callback, max_epochs=3).fit(ToyModule(), loader(Few(), batch_size=5))
    assert len(changes) == 36
    assert all(positives == changed for positives, changed in changes)
    assert {positives for positives, _ in changes} == {True, False}


@pytest.mark.parametrize("settings", [{"weight": -1}, {"lr": 0}])
def test_bad_input(settings):
    with pytest.raises(ValueError, match=rf"`{next(iter(settings))}` to be a number (above|of at least) 0 but got"):
        AdversarialDebiasing(groups="group", **settings)


@pytest.mark.parametrize(
    ("criterion", "features", "seen"),
    [
        ("demographic_parity", 2, [True] * 4),
        ("equalized_odds", 4, [True] * 4),
        ("equal_opportunity", 2, [False, False, True, True]),
        (EqualOpportunity(positive_label=0), 2, [True, True, False, False]),
    ],
    ids=str,
)
def test_what_the_adversary_sees(criterion, features, seen):
    callback = AdversarialDebiasing(criterion, groups="group")
    assert callback.adversary is None
    trainer(callback, max_epochs=1).fit(ToyModule(), loader())
    assert callback.adversary[0].in_features == features
    assert callback.adversary[-1].out_features == 3
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    shown, groups = callback._what_it_sees(logits, torch.tensor([0, 2, 4, 5]))
    assert torch.equal(shown[:, :2], logits[seen])
    assert torch.equal(groups, torch.tensor([0, 2, 1, 2])[seen])
    if features == 4:
        assert shown[:, 2:].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
