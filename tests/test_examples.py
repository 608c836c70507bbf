"""The examples run, and the generated data is what the paper's formula gives."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SYNTHETIC = Path(__file__).parent.parent / "examples" / "synthetic.py"


@pytest.fixture(scope="module")
def synthetic():
    spec = importlib.util.spec_from_file_location("synthetic", SYNTHETIC)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_data_has_the_authors_proportions(synthetic):
    """z=1 for 27% of y=0 and 64% of y=1, with means and covariances as printed."""
    x, y, z = (tensor.numpy() for tensor in synthetic.generate(100_000, seed=0).tensors)
    assert z[y == 0].mean() == pytest.approx(0.27, abs=0.01)
    assert z[y == 1].mean() == pytest.approx(0.64, abs=0.01)
    np.testing.assert_allclose(np.cov(x[y == 0, :2].T), [[10, 1], [1, 3]], atol=0.2)
    np.testing.assert_allclose(np.cov(x[y == 1, :2].T), [[5, 1], [1, 5]], atol=0.2)
    np.testing.assert_allclose(x[y == 1, :2].mean(0), [2, 2], atol=0.05)
    assert (x[:, 2] == z).all()


@pytest.mark.slow
def test_fairbatch_closes_the_gap_on_generated_data(synthetic):
    """A short run in a real Trainer: much less disparity, little less accuracy."""
    train_set, test_set = synthetic.generate(2000, seed=0), synthetic.generate(20_000, seed=1)
    plain = synthetic.evaluate(synthetic.train(train_set, "plain", 0, 60, 0.02), test_set)
    fair = synthetic.evaluate(synthetic.train(train_set, "equal_opportunity", 0, 120, 0.02), test_set)
    assert plain["EO"] > 0.1
    assert fair["EO"] < plain["EO"] / 2
    assert fair["accuracy"] > plain["accuracy"] - 0.05


@pytest.mark.slow
def test_script_prints_the_table(tmp_path):
    rng = np.random.default_rng(0)
    parts = {
        f"{name}_{part}": value
        for part, n in (("train", 200), ("test", 100))
        for name, value in (
            ("x", rng.normal(size=(n, 3))),
            ("y", rng.choice([-1, 1], n)),
            ("z", rng.integers(2, size=n)),
        )
    }
    np.savez(tmp_path / "data.npz", **parts)
    command = [sys.executable, SYNTHETIC, "--seeds", "1", "--epochs", "2", "--data", tmp_path / "data.npz"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()] == [
        "method",
        "plain",
        "equal_opportunity",
        "equalized_odds",
        "demographic_parity",
    ]
