"""The figures of the paper's comparison."""

import csv
import json

import numpy as np
import pytest
import torch


def test_disparities_over_models(module, tmp_path, capsys):
    figures = module("figures")
    assert figures.disparities_over_models(tmp_path, None) is None
    assert "for lack of" in capsys.readouterr().out
    for method, models in (("LBC", 3), ("AdaFair", 4)):
        for criterion in figures.CRITERIA:
            result = {"models": models, "setting": {}}
            (tmp_path / f"synthetic_{criterion}_{method}_0.json").write_text(json.dumps(result))
    panels = figures.disparities_over_models(tmp_path, None).axes
    lines = [line for panel in panels for line in panel.lines if len(line.get_xdata()) > 1]
    assert [len(line.get_xdata()) for line in lines] == [3, 4, 3, 4]
    assert all(line.get_ydata()[-1] < line.get_ydata()[0] for line in lines[::2])  # AdaFair takes more


def test_epoch_from_which_on_it_is_low(module):
    low_from = module("figures").low_from
    assert low_from([0.3, 0.1, 0.3, 0.1, 0.1], 0.1) == 4
    assert low_from([0.1, 0.1], 0.1) == 1
    assert low_from([0.1, 0.3], 0.1) is None


def test_surface_is_low_where_the_groups_are_drawn_alike(module):
    """On data whose groups differ in nothing but their number."""
    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    z = (torch.arange(4000) % 4 == 0).long()
    y = (x[:, 0] + torch.randn(4000, generator=torch.Generator().manual_seed(1)) > 0).long()
    data = module("data")
    dataset = torch.utils.data.TensorDataset(torch.column_stack([x, z]), y, z)
    given = data.Problem("toy", dataset, dataset, 100, 0.1, 1)
    found = module("figures").surface(given, torch.tensor([0.1, 0.5, 0.9]))
    assert found.diagonal().max() < 0.05
    assert min(found[0, 2], found[2, 0]) > 0.3


def test_the_path_of_the_shares_starts_at_those_of_the_data(module, tmp_path, capsys):
    assert module("figures").share_path(tmp_path, 1) is None
    assert "for lack of COMPAS" in capsys.readouterr().out
    random = np.random.default_rng(0)
    names = "sex race age_cat priors_count c_charge_degree two_year_recid days_b_screening_arrest is_recid score_text"
    with (tmp_path / "compas-scores-two-years.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names.split())
        for sex, recid in random.integers(2, size=(400, 2)):
            age, priors = random.choice(["Less than 25", "25 - 45"]), random.integers(5)
            writer.writerow([["Male", "Female"][sex], "Caucasian", age, priors, "F", recid, 0, 0, "Low"])
    _, y, z = module("data").problem("compas", tmp_path, 0).train.tensors
    panel = module("figures").share_path(tmp_path, 3).axes[0]
    paths = [line.get_xydata() for line in panel.lines if len(line.get_xydata()) > 1]
    assert len(paths[0]) == 4  # an update after each of three epochs
    assert len(paths[1]) > 4  # and within them
    for path in paths:
        assert path[0] == pytest.approx([float(z[y == label].float().mean()) for label in (1, 0)])
