"""Signals against brute force over samples."""

import pytest
import torch

from fairbatch_lightning import DemographicParity, EqualizedOdds, EqualOpportunity


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
    counts = torch.tensor([[len(cell) for cell in row] for row in cells])
    return means, counts, cells


def test_equalized_odds_compares_cell_means(samples):
    means, counts, _ = per_cell(samples)
    torch.testing.assert_close(EqualizedOdds().signal(means, counts), means, equal_nan=True)


@pytest.mark.parametrize("positive", [0, 1, 2])
def test_equal_opportunity_looks_at_one_label(samples, positive):
    means, counts, _ = per_cell(samples)
    signal = EqualOpportunity(positive).signal(means, counts)
    torch.testing.assert_close(signal[positive], means[positive], equal_nan=True)
    assert signal[[y for y in range(3) if y != positive]].isnan().all()


@pytest.mark.parametrize("positive", [0, 1, 2])
def test_demographic_parity_weighs_cells_by_their_part_of_the_group(samples, positive):
    means, counts, cells = per_cell(samples)
    groups = samples[2]
    signal = DemographicParity(positive).signal(means, counts)
    assert DemographicParity(positive).target == positive
    for y in range(3):
        for z in range(4):
            expected = float(cells[y][z].sum() / (groups == z).sum()) * (1 if y == positive else -1)
            if (y, z) == (2, 3):
                assert signal[y, z].isnan()
            else:
                assert float(signal[y, z]) == pytest.approx(expected)


@pytest.mark.parametrize("criterion", [EqualOpportunity(), EqualizedOdds(), DemographicParity()])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_losses_take_no_part(criterion, value):
    losses = torch.tensor([[0.1, 0.2, 0.3], [0.4, value, 0.6]])
    signal = criterion.signal(losses, torch.ones(2, 3, dtype=torch.long))
    assert signal[1].isnan().tolist() == [False, True, False]
