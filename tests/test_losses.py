"""Per-sample losses and logits for every kind of head."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.losses import SampleLoss, cross_entropy, error, find_logits, resolve_loss


def index(labels):
    """Return an index with a single group, so that a cell's number is its row's."""
    return GroupIndex.from_values(labels, [0] * len(labels))


def test_binary_heads_equal_two_class_heads():
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 2
    two_class = torch.stack([torch.zeros(20), logits], 1)
    for loss in (cross_entropy, error):
        expected = loss(two_class, labels)
        torch.testing.assert_close(loss(logits, labels), expected)
        torch.testing.assert_close(loss(logits.unsqueeze(1), labels), expected)


def test_half_precision_is_measured_in_single():
    logits = torch.randn(8, 3).bfloat16()
    assert cross_entropy(logits, torch.zeros(8, dtype=torch.long)).dtype == torch.float32


GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", ["logits", "aux_logits2", "aux_logits1"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"logits": t, "loss": torch.zeros(())},
        lambda t: GoogLeNetOutputs(t, None, None),
        lambda t: SimpleNamespace(logits=t, hidden_states=None),
    ],
    ids=["tensor", "dict", "GoogLeNet", "Hugging Face"],
)
def test_logits_are_found(wrap):
    tensor = torch.randn(4, 2)
    assert find_logits(wrap(tensor)) is tensor


@pytest.mark.parametrize("output", [None, 3, {"loss": torch.zeros(())}, "logits", (torch.zeros(2),)])
def test_no_logits_are_none(output):
    assert find_logits(output) is None


@pytest.mark.parametrize(
    ("labels", "num_classes", "classes"),
    [
        ([0, 1], 2, [0, 1]),
        ([0, 2], 3, [0, 2]),  # class 1 does not occur in the training set
        ([1, 2], 2, [0, 1]),
        ([-1, 1], 2, [0, 1]),
        (["no", "yes"], 2, [0, 1]),
        ([False, True], 2, [0, 1]),
    ],
)
def test_classes_of_the_labels(labels, num_classes, classes):
    seen = []

    def spy(logits, targets):
        seen.extend(targets.tolist())
        return targets.float()

    SampleLoss(index(labels), spy, None)(torch.zeros(2, num_classes), torch.tensor([0, 1]))
    assert seen == classes


def test_binary_head_with_minus_one_and_one():
    losses = SampleLoss(index([-1, 1]), cross_entropy, None)(torch.tensor([3.0, 3.0]), torch.tensor([0, 1]))
    expected = functional.binary_cross_entropy_with_logits(
        torch.tensor([3.0, 3.0]), torch.tensor([0.0, 1.0]), reduction="none"
    )
    torch.testing.assert_close(losses, expected)


def test_all_samples_against_one_label():
    losses = SampleLoss(index([0, 1]), error, target=1)(torch.tensor([-1.0, 1.0, 1.0]), torch.tensor([0, 0, 1]))
    assert losses.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SampleLoss(index([0, 1, 2]), error, None)(torch.zeros(3, 2), torch.arange(3)), "each of the 3 labels"),
        (lambda: SampleLoss(index([0, 1, 2]), error, None)(torch.zeros(3), torch.arange(3)), "its logits have 2"),
        (
            lambda: SampleLoss(index([0, 1]), error, None)(torch.zeros(2, 2, 4, 4), torch.arange(2)),
            "one prediction per",
        ),
        (
            lambda: SampleLoss(index([0, 1]), lambda x, y: x.mean(), None)(torch.zeros(2, 2), torch.arange(2)),
            r"one value per sample, shape \(2,\), but got \(\).*reduction='none'",
        ),
        (
            lambda: SampleLoss(index([0, 1]), lambda x, y: 1.0, None)(torch.zeros(2, 2), torch.arange(2)),
            r"but got float",
        ),
        (lambda: resolve_loss("mse"), "`loss` to be None, \"error\" or a function .* but got 'mse'"),
    ],
)
def test_bad_losses_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
