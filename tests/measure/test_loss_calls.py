"""Losses of a step, as torch computes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fairbatch_lightning.measure.loss_calls import LossCalls

LOGITS, LABELS = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])


def focal(logits, y):
    log_p = functional.log_softmax(logits, dim=1).gather(1, y.unsqueeze(1))
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


LOSSES = {
    "cross_entropy": lambda logits, y: functional.cross_entropy(logits, y),
    "keywords": lambda logits, y: functional.cross_entropy(input=logits, target=y),
    "module": lambda logits, y: nn.CrossEntropyLoss(label_smoothing=0.1)(logits, y),
    "nll": lambda logits, y: nn.NLLLoss()(logits.log_softmax(1), y),
    "temperature": lambda logits, y: functional.cross_entropy((logits - 1).float() / 3, y),
    "margin": lambda logits, y: nn.MultiMarginLoss()(logits, y),
    "focal": focal,
    "taken": lambda logits, y: torch.take_along_dim(logits.log_softmax(1), y.unsqueeze(1), 1).mean(),
    "indexed": lambda logits, y: logits.log_softmax(1)[torch.arange(5), y].mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_outputs_and_labels_of_a_loss_are_noted(name):
    plain = LOSSES[name](LOGITS, LABELS)
    with LossCalls(5) as noted:
        watched = LOSSES[name](LOGITS, LABELS)
    assert torch.equal(plain, watched)
    assert any(call.is_of(LOGITS) and torch.equal(call.target.flatten(), LABELS) for call in noted.calls)
    assert not any(call.is_of(torch.randn(5, 3)) for call in noted.calls)


def test_a_detached_output_is_still_the_same():
    with LossCalls(5) as noted:
        functional.cross_entropy(LOGITS, LABELS)
    assert noted.calls[0].is_of(LOGITS.detach())


def test_losses_of_other_sizes_are_none_of_these_samples():
    with LossCalls(5) as noted:
        functional.cross_entropy(torch.randn(7, 3), torch.zeros(7, dtype=torch.long))
    assert noted.calls == []


def test_probabilities_are_a_sign_of_logits():
    with LossCalls(5) as noted:
        (LOGITS / 2).softmax(1)
    assert noted.normalises(LOGITS)
    assert not noted.normalises(torch.randn(5, 3))


def test_large_activations_are_not_kept_alive():
    with LossCalls(5) as noted:
        torch.randn(5, 3, 8, 8).float().mul(2).clone()
    assert noted._made_of == {}


def test_nothing_is_noted_afterwards():
    with LossCalls(5) as noted:
        pass
    functional.cross_entropy(LOGITS, LABELS)
    assert noted.calls == []
