"""Tables of an audit."""

import pytest
import torch

from fairbatch_lightning.fairness import Audit
from fairbatch_lightning.reports.tables import as_text, cell_table, measure_table


def audit_of(confusion, **options):
    labels, groups = (tuple(map(str, range(number))) for number in confusion.shape[1::-1])
    return Audit(confusion, labels, groups, **options)


def test_table_is_aligned():
    lines = as_text(cell_table(audit_of(torch.randint(1, 90, (3, 2, 2))), "Fairness")).splitlines()
    assert lines[0].startswith("Fairness: ")
    assert lines[1].split() == ["label", "group", "samples", "right", "95%", "interval"]
    assert len(lines) == 2 + 6
    assert len({line.index("to") for line in lines[2:8]}) == 1


def test_small_and_empty_cells_are_flagged():
    table = cell_table(audit_of(torch.tensor([[[40, 0], [0, 3]], [[30, 0], [0, 0]]])), "Fairness on test data")
    assert table.title == "Fairness on test data: 73 samples; cells of fewer than 30 samples say little"
    assert [row[2:4] + row[5:] for row in table.rows] == [
        ["40", "1.000", ""],
        ["30", "1.000", ""],
        ["3", "1.000", "small"],
        ["0", "undefined", "none"],
    ]


def test_measures_have_values_and_intervals_as_the_audit_says():
    audit = audit_of(torch.tensor([[[40, 9], [7, 30]], [[30, 11], [5, 20]]]), min_samples=5)
    values, intervals = audit.values(), audit.intervals()
    table = measure_table(audit)
    assert table.title.endswith("; disparities are of cells of at least 5 samples")
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows)[:3] == ["accuracy", "accuracy of 0", "accuracy of 1"]
    for name in ("equal_opportunity", "equalized_odds", "demographic_parity"):
        texts = [f"{values[n]:.3f} {intervals[n][0]:.3f} to {intervals[n][1]:.3f}" for n in (name, f"{name}_ratio")]
        assert " ".join(rows[name.replace("_", " ")]) == " ".join(texts)
    assert rows["worst cell accuracy"] == [f"{values['worst_cell_accuracy']:.3f}", "", "", ""]
    broken = {row[0]: row[1:] for row in measure_table(audit_of(audit.confusion, num_broken=1)).rows}
    assert broken["accuracy of 1"][0] == broken["equalized odds"][0] == broken["equalized odds"][2] == "undefined"
    assert len(measure_table(audit_of(torch.ones(21, 2, 2, dtype=torch.long))).rows) == 6  # no row for every group


@pytest.mark.parametrize(
    ("confusion", "said"),
    [
        ([[50, 0], [50, 0]], True),  # "perfectly fair"
        ([[50, 0], [46, 4]], True),
        ([[50, 0], [40, 10]], False),
        ([[990, 0], [2, 8]], False),  # rare, but told apart
        ([[0, 0], [0, 30]], False),  # there is but one label
    ],
)
def test_a_model_that_predicts_one_class_is_no_fair_one(confusion, said):
    title = measure_table(audit_of(torch.tensor([confusion, confusion]))).title
    assert ("But nearly all predictions (" in title) == said


@pytest.mark.slow
def test_many_labels_stay_bearable():
    generator = torch.Generator().manual_seed(0)
    confusion = torch.randint(3, (4, 40, 40), generator=generator)
    audit = Audit(confusion, tuple(map(str, range(40))), tuple("abcd"), None)
    cells = cell_table(audit, "Fairness", most=60)
    assert len(cells.rows) == 60
    assert "the 60 of 160 cells that are worst off" in cells.title
    right = confusion.diagonal(dim1=1, dim2=2) / confusion.sum(2)
    assert cells.rows[0][3] == f"{float(right.min()):.3f}"
    assert measure_table(audit).rows[4][2]
    assert len(cell_table(audit).rows) == 160
