"""Per-sample losses for every kind of head."""

import pytest
import torch
from torch.nn import functional

from fairbatch_lightning import GroupIndex
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.measure.per_sample import SampleLoss, cross_entropy, error, resolve_loss


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


@pytest.mark.parametrize(
    ("labels", "num_classes", "classes"),
    [
        ([0, 1], 2, [0, 1]),
        ([0, 2], 3, [0, 2]),  # class 1 does not occur in the training set
        ([1, 2], 2, [0, 1]),
        ([-1, 1], 2, [0, 1]),
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


def test_names_are_the_classes_that_were_learnt():
    """Which of the outputs is "dog" does not follow from the alphabet."""
    classes = ClassNumbers()
    loss = SampleLoss(index(["cat", "dog"]), cross_entropy, None, classes)
    with pytest.raises(ValueError, match=r"tells 4 classes apart, but the data has the labels \['cat', 'dog'\]"):
        loss(torch.zeros(2, 4), torch.tensor([0, 1]))
    classes.learn({"cat": 3, "dog": 1})
    logits = torch.randn(2, 4)
    expected = functional.cross_entropy(logits, torch.tensor([3, 1]), reduction="none")
    torch.testing.assert_close(loss(logits, torch.tensor([0, 1])), expected)


def test_binary_head_with_minus_one_and_one():
    losses = SampleLoss(index([-1, 1]), cross_entropy, None)(torch.tensor([3.0, 3.0]), torch.tensor([0, 1]))
    expected = functional.binary_cross_entropy_with_logits(
        torch.tensor([3.0, 3.0]), torch.tensor([0.0, 1.0]), reduction="none"
    )
    torch.testing.assert_close(losses, expected)


def test_all_samples_against_one_label():
    losses = SampleLoss(index([0, 1]), error, target=1)(torch.tensor([-1.0, 1.0, 1.0]), torch.tensor([0, 0, 1]))
    assert losses.tolist() == [1, 0, 0]


def test_the_one_label_is_a_row_and_its_class_may_have_another_number():
    losses = SampleLoss(index([0, 2]), error, target=1)(torch.eye(3), torch.tensor([0, 0, 1]))
    assert losses.tolist() == [1, 1, 0]


def test_cells_of_several_groups_have_the_class_of_their_label():
    several = GroupIndex.from_values([0, 0, 1, 1], ["a", "b", "a", "b"])
    classes = SampleLoss(several, error, None).classes(torch.zeros(4, 2), torch.arange(4))
    assert classes.tolist() == [0, 0, 1, 1]


def test_losses_by_name():
    assert resolve_loss(None) is cross_entropy
    assert resolve_loss("error") is error
    assert resolve_loss(functional.mse_loss) is functional.mse_loss


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
