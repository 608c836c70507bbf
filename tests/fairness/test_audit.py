"""Audits: which rates count, and what is said about those that do not."""

import math

import numpy as np
import pytest
import torch

from fairbatch_lightning.fairness import Audit


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("positive", [None, 1])
def test_rates_of_few_samples_are_left_out(seed, positive):
    """Against the words: every rate of a group with enough samples for it, compared with everybody's."""
    random = np.random.default_rng(seed)
    confusion = random.integers(0, 12, (6, 3, 3)) * random.integers(0, 2, (6, 3, 1))
    audit = Audit(torch.from_numpy(confusion), tuple("abc"), tuple("uvwxyz"), positive, min_samples=15)
    rest = range(3) if positive is None else [positive]
    expected = {"equal_opportunity": [], "equalized_odds": [], "demographic_parity": []}
    for group in confusion:
        for guess in rest:
            if group.sum() >= 15:
                everybody = confusion[:, :, guess].sum() / confusion.sum()
                expected["demographic_parity"].append(abs(group[:, guess].sum() / group.sum() - everybody))
            for label in range(3):
                if group[label].sum() >= 15:
                    everybody = confusion[:, label, guess].sum() / confusion[:, label].sum()
                    off = abs(group[label, guess] / group[label].sum() - everybody)
                    expected["equalized_odds"].append((label, off))
                    if label == guess:
                        expected["equal_opportunity"].append((label, off))
    for name, found in expected.items():
        if name != "demographic_parity":  # of a label that only one group has enough samples of nothing is compared
            labels = [label for label, _ in found]
            per_group = len(rest) if name == "equalized_odds" else 1
            found = [off for label, off in found if labels.count(label) > per_group]
        assert audit.values()[name] == pytest.approx(max(found, default=np.nan), abs=1e-12, nan_ok=True)
        low, high = audit.intervals()[name]
        assert not found or low <= audit.values()[name] <= high


def test_few_samples_do_not_widen_intervals():
    confusion = torch.tensor([[[90, 10], [20, 80]], [[80, 20], [10, 90]], [[1, 1], [2, 0]]])
    whole, part = (Audit(confusion, tuple("ab"), tuple("xyz"), min_samples=least) for least in (1, 30))
    assert whole.values()["equalized_odds"] > 0.5
    assert part.values()["equalized_odds"] < 0.1
    (low, high), (lowest, highest) = part.intervals()["equalized_odds"], whole.intervals()["equalized_odds"]
    assert high - low < (highest - lowest) / 2
    assert part.values()["accuracy"] == whole.values()["accuracy"]


def test_labels_that_are_not_compared_do_not_widen_intervals():
    """Of label c only one group has enough samples: it might as well not be there."""
    both = torch.tensor([[900, 100, 0], [100, 900, 0]])
    few, none = torch.tensor([[1, 1, 28]]), torch.tensor([[0, 0, 0]])
    with_it = torch.stack([torch.cat([both, few]), torch.cat([both, torch.tensor([[0, 0, 2]])])])
    without = torch.stack([torch.cat([both, none]), torch.cat([both, none])])
    ends = [
        Audit(counts, tuple("abc"), tuple("xy"), None, min_samples=30).intervals()["equalized_odds"]
        for counts in (with_it, without)
    ]
    assert ends[0][1] == pytest.approx(ends[1][1], abs=0.01)


def test_nothing_left_to_compare_is_said():
    audit = Audit(torch.full((2, 2, 2), 3), tuple("ab"), tuple("xy"), min_samples=50)
    (problem,) = audit.problems("test")
    assert "no label has 50 test samples of two groups" in problem


def test_cells_and_groups_are_counted_apart():
    confusion = torch.tensor([[[3, 1], [0, 0]], [[2, 2], [5, 15]]])
    audit = Audit(confusion, ("no", "yes"), ("x", "y"))
    cells = audit.cells()
    assert [(cell.label, cell.group, cell.samples) for cell in cells] == [
        ("no", "x", 4),
        ("no", "y", 4),
        ("yes", "x", 0),
        ("yes", "y", 20),
    ]
    assert [cell.right for cell in cells] == pytest.approx([0.75, 0.5, math.nan, 0.75], nan_ok=True)
    for cell in (cell for cell in cells if cell.samples):  # Wilson's: the rates from which this is 1.96 deviations away
        for end in cell.interval:
            assert abs(cell.right - end) == pytest.approx(1.959964 * (end * (1 - end) / cell.samples) ** 0.5)
    assert math.isnan(cells[2].interval[0])
    assert audit.group_accuracies() == {"x": 0.75, "y": 17 / 24}
    assert all(low < audit.group_accuracies()[group] < high for group, (low, high) in audit.group_intervals().items())


def test_of_a_diverged_model_nothing_is_known():
    audit = Audit(torch.full((2, 2, 2), 9), ("no", "yes"), ("x", "y"), num_broken=1)
    assert all(map(math.isnan, [*audit.values().values(), *audit.group_accuracies().values()]))
    assert math.isnan(audit.intervals()["equalized_odds"][0])
    assert "the logits of 1 val samples are NaN" in audit.problems("val")[0]


def test_so_many_labels_have_no_intervals():
    audit = Audit(torch.ones(3, 300, 300, dtype=torch.long), tuple(map(str, range(300))), tuple("abc"), None)
    assert all(math.isnan(low) for name, (low, _) in audit.intervals().items() if name != "accuracy")
