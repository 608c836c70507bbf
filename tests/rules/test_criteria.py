"""Signals against brute force over samples; what a criterion compares, and what it leaves out."""

import pytest
import torch
from helpers import index_of_counts
from torch.utils.data import DataLoader, TensorDataset

from fairbatch_lightning import DemographicParity, EqualizedOdds, EqualOpportunity, FairBatchWarning, GroupIndex
from fairbatch_lightning.cells.classes import ClassNumbers
from fairbatch_lightning.fairness.counts import HeldOutPass
from fairbatch_lightning.rules.criteria import CRITERIA, check_compare, compared_rows, row_gaps


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(1)
    losses = torch.rand(500, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (500,), generator=generator)
    groups = torch.randint(4, (500,), generator=generator)
    keep = ~((labels == 2) & (groups == 3))  # one empty cell
    return losses[keep], labels[keep], groups[keep]


def per_cell(samples):
    losses, labels, groups = samples
    cells = [[losses[(labels == y) & (groups == z)] for z in range(4)] for y in range(3)]
    means = torch.stack([torch.stack([cell.mean() for cell in row]) for row in cells])
    return means, GroupIndex.from_values(labels, groups), cells


class TestSignals:
    def test_equalized_odds_compares_cell_means(self, samples):
        means, index, _ = per_cell(samples)
        for signal in (EqualizedOdds().signal(means, index), EqualizedOdds().compared(means, index)):
            torch.testing.assert_close(signal, means, equal_nan=True)

    @pytest.mark.parametrize("positive", [0, 1, 2])
    def test_equal_opportunity_looks_at_one_label(self, samples, positive):
        means, index, _ = per_cell(samples)
        signal = EqualOpportunity(positive).signal(means, index)
        torch.testing.assert_close(signal[positive], means[positive], equal_nan=True)
        assert signal[[y for y in range(3) if y != positive]].isnan().all()

    @pytest.mark.parametrize("positive", [0, 1, 2])
    def test_demographic_parity_weighs_cells_by_their_part_of_the_group(self, samples, positive):
        means, index, cells = per_cell(samples)
        groups = samples[2]
        signal = DemographicParity(positive).compared(means, index)
        assert DemographicParity(positive).target(index) == positive
        for y in range(3):
            for z in range(4):
                expected = float(cells[y][z].sum() / (groups == z).sum()) * (1 if y == positive else -1)
                if (y, z) == (2, 3):
                    assert signal[y, z].isnan()
                else:
                    assert float(signal[y, z]) == pytest.approx(expected)

    @pytest.mark.parametrize("criterion", [EqualizedOdds(), EqualOpportunity(1)])
    def test_other_criteria_measure_samples_against_their_own_labels(self, criterion):
        assert criterion.target(index_of_counts([[1, 1], [1, 1]])) is None


class TestCompared:
    @pytest.mark.parametrize("criterion", [EqualOpportunity(), EqualizedOdds(), DemographicParity()])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_broken_losses_take_no_part(self, criterion, value):
        losses = torch.tensor([[0.1, 0.2, 0.3], [0.4, value, 0.6]])
        signal = criterion.compared(losses, index_of_counts(torch.ones(2, 3, dtype=torch.long)))
        assert signal[1].isnan().tolist() == [False, True, False]

    @pytest.mark.parametrize("name", CRITERIA)
    def test_small_cells_take_no_part(self, name):
        index = index_of_counts([[9, 9, 9], [10, 4, 5]])
        signal = CRITERIA[name](min_samples=5).compared(torch.ones(2, 3), index)
        assert signal[1].isnan().tolist() == [False, True, False]

    @pytest.mark.parametrize("name", CRITERIA)
    @pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
    def test_impossible_numbers_of_samples_are_refused(self, name, number):
        with pytest.raises(ValueError, match="`min_samples` to be an integer of at least 1 but got"):
            CRITERIA[name](min_samples=number)

    def test_rows(self):
        index = index_of_counts([[3, 3, 1], [1, 3, 1], [2, 2, 2]])
        assert compared_rows(EqualizedOdds(), index).tolist() == [True, True, True]
        assert compared_rows(EqualizedOdds(min_samples=2), index).tolist() == [True, False, True]
        assert compared_rows(EqualizedOdds(min_samples=3), index).tolist() == [True, False, False]
        assert compared_rows(EqualOpportunity(2), index).tolist() == [False, False, True]
        assert compared_rows(DemographicParity(2), index).tolist() == [True, True, True]

    def test_empty_cells_are_named(self):
        index = index_of_counts([[3, 0, 2], [1, 3, 1]])
        with pytest.warns(FairBatchWarning, match=r"no samples in the cells \(label 0, group 1\)\. They take no part"):
            assert compared_rows(EqualizedOdds(), index).tolist() == [True, True]

    @pytest.mark.parametrize(
        ("criterion", "counts", "message"),
        [
            (EqualizedOdds(), [[5], [5]], "a label with samples of at least two groups to compare"),
            (EqualizedOdds(min_samples=4), [[5, 3], [3, 5]], r"a label with 4 samples .*Equali.*\(min_samples=4\)"),
            (EqualOpportunity(), [[5, 5], [5, 0]], r"have the counts \[\[5, 5\], \[5, 0\]\]"),
            (EqualOpportunity(7), [[5, 5], [5, 5]], r"`positive_label` to be one of .*\[0, 1\] but got 7"),
            (DemographicParity(-1), [[5, 5], [5, 5]], r"`positive_label` to be one of .*\[0, 1\] but got -1"),
        ],
    )
    def test_data_with_nothing_to_compare_is_refused(self, criterion, counts, message):
        with pytest.raises(ValueError, match=message):
            compared_rows(criterion, index_of_counts(counts))


KINDS = {"numbers": [0, 1], "signs": [-1, 1], "names": ["no", "yes"], "others": [3, 8], "booleans": [False, True]}


def monitored_positive(index, num_classes):
    """Return the class that FairnessMonitor compares by default: one, or None for each in turn."""
    data = DataLoader(TensorDataset(torch.arange(len(index))), batch_size=len(index))
    classes = ClassNumbers()
    if isinstance(index.label_values[0], str):
        classes.learn({label: number for number, label in enumerate(index.label_values)})
    held_out = HeldOutPass(data, index, torch.device("cpu"), classes)
    held_out.add(held_out.next_batch(), torch.zeros(len(index), num_classes))
    return held_out.counts.audit().positive


class TestPositiveLabel:
    """None means the same here as for FairnessMonitor."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_two_labels_the_second(self, kind):
        index = GroupIndex.from_values(KINDS[kind] * 4, ["a", "a", "b", "b"] * 2)
        positive = monitored_positive(index, 2)
        assert positive == 1
        losses = torch.rand(2, 2)
        assert compared_rows(EqualOpportunity(), index).tolist() == [False, True]
        assert DemographicParity().target(index) == positive
        for criterion in (EqualOpportunity, DemographicParity):
            named = criterion(positive_label=KINDS[kind][1])
            torch.testing.assert_close(
                criterion().compared(losses, index), named.compared(losses, index), equal_nan=True
            )
            other = criterion(positive_label=KINDS[kind][0])
            assert not torch.allclose(criterion().signal(losses, index), other.signal(losses, index), equal_nan=True)

    def test_of_more_labels_equal_opportunity_takes_each_in_turn(self):
        index = GroupIndex.from_values([0, 1, 2] * 4, (["a"] * 3 + ["b"] * 3) * 2)
        assert monitored_positive(index, 3) is None
        losses = torch.rand(3, 2)
        assert compared_rows(EqualOpportunity(), index).all()
        assert torch.equal(EqualOpportunity().compared(losses, index), EqualizedOdds().compared(losses, index))

    def test_of_more_labels_demographic_parity_asks_for_one(self):
        index = GroupIndex.from_values(["x", "y", "z"] * 2, ["a"] * 3 + ["b"] * 3)
        message = r"3 labels \['x', 'y', 'z'\]: DemographicParity\(positive_label=\.\.\.\)"
        with pytest.raises(ValueError, match=message):
            DemographicParity().target(index)
        with pytest.raises(ValueError, match=message):
            compared_rows(DemographicParity(), index)
        assert DemographicParity("y").target(index) == 1

    @pytest.mark.parametrize("criterion", [EqualOpportunity, DemographicParity])
    @pytest.mark.parametrize("label", ["yes", "no"])
    def test_by_its_name(self, criterion, label):
        index = GroupIndex.from_values(["no", "yes", "no", "yes"], ["a", "a", "b", "b"])
        row = ["no", "yes"].index(label)
        signal = criterion(label).compared(torch.ones(2, 2), index)
        assert (signal[row] > 0).all()
        assert not (signal[1 - row] > 0).any()


class TestGaps:
    def test_the_largest_difference_or_that_of_neighbours(self):
        signal = torch.tensor([[1.0, 5.0, 2.0, 8.0]])
        assert [float(row_gaps(signal, compare)) for compare in ("row", "all", "neighbours")] == [7, 7, 6]

    def test_fewer_than_two_groups_have_none(self):
        signal = torch.tensor([[torch.nan, torch.nan], [torch.nan, 1.0], [2.0, 1.0]])
        for compare in ("row", "all", "neighbours"):
            assert row_gaps(signal, compare).isnan().tolist() == [True, True, False]

    def test_unknown_comparisons_are_refused(self):
        with pytest.raises(ValueError, match=r"`compare` to be one of \('row', 'neighbours', 'all'\) but got 'mean'"):
            check_compare("mean")
