"""FairBatch(criterion, groups=...) and nothing else, in a real Trainer: it acts, and says what it does."""

import csv

import lightning as L
import pytest
import torch
from helpers import GROUPS, ToyModule, loader, trainer
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fairbatch_lightning import FairBatch, FairBatchWarning, FairnessMonitor

CRITERIA = ("equal_opportunity", "equalized_odds", "demographic_parity")


class Linear(L.LightningModule):
    """Logistic regression that sees the group; a sample is (x, y, z)."""

    def __init__(self, num_features, lr=0.01, num_labels=2):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr = torch.nn.Linear(num_features, num_labels), lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def unfair(num_samples=2000, seed=0):
    """Return data in which the positive label is frequent in one group and rare in the other, with noisy features."""
    generator = torch.Generator().manual_seed(seed)
    z = (torch.rand(num_samples, generator=generator) < 0.4).long()
    y = (torch.rand(num_samples, generator=generator) < 0.25 + 0.45 * z).long()
    x = y.float().unsqueeze(1) * 1.5 + torch.randn(num_samples, 2, generator=generator) * 1.5
    return TensorDataset(torch.column_stack([x, z]), y, z)


def disparities(module, data):
    from fairbatch_lightning.fairness import Audit
    from fairbatch_lightning.fairness.disparities import group_confusion

    x, y, z = data.tensors
    confusion = group_confusion(module(x).argmax(1), y, z, num_labels=2, num_groups=int(z.max()) + 1)
    names = [str(group) for group in range(confusion.shape[0])]
    return Audit(confusion, ("0", "1"), tuple(names), 1).values()


def fitted(callbacks, epochs, data=None, **settings):
    module, data = Linear(3, **settings), unfair() if data is None else data
    trainer(*callbacks, max_epochs=epochs).fit(module, DataLoader(data, batch_size=50, shuffle=True))
    return disparities(module, data)


@pytest.mark.parametrize(("epochs", "lr"), [(3, 0.05), (20, 0.01)])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_it_acts_whatever_the_length_of_the_training(criterion, epochs, lr):
    plain = fitted([], epochs, lr=lr)
    fair = fitted([FairBatch(criterion, groups=2)], epochs, lr=lr)
    assert plain[criterion] > 0.1
    assert fair[criterion] < plain[criterion] / 2
    assert fair["accuracy"] > plain["accuracy"] - (0.15 if criterion == "demographic_parity" else 0.06)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_gap_is_what_the_monitor_reports(criterion):
    """Of the same predictions: the model does not learn, and both see all samples."""
    data = unfair(600)
    module, monitor = Linear(3, lr=0.0), FairnessMonitor(groups=2)
    fairbatch = FairBatch(criterion, groups=2, estimate="exact")
    run = trainer(fairbatch, monitor, max_epochs=1)
    run.fit(module, DataLoader(data, batch_size=50, shuffle=True), DataLoader(data, batch_size=100))
    expected = monitor.history[-1].values[criterion]
    assert expected > 0
    assert fairbatch.history[-1].gap_max == pytest.approx(expected, abs=1e-6)
    assert float(run.progress_bar_metrics["fairbatch/gap_max"]) == pytest.approx(expected, abs=1e-6)


def test_errors_are_logged_as_such(tmp_path):
    fairbatch = FairBatch(groups="group")
    run = trainer(fairbatch, max_epochs=1, logger=CSVLogger(tmp_path))
    run.fit(ToyModule(), loader())
    with open(f"{run.logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["fairbatch/gap_max"]]
    assert len(rows) == len(fairbatch.history) == 12
    for row, record in zip(rows, fairbatch.history, strict=True):
        for y in range(2):
            for z, group in enumerate(GROUPS):
                error = float(record.losses[y, z])
                assert 0 <= error <= 1 or error != error
                if row[f"fairbatch/error/{y}/{group}"]:
                    assert float(row[f"fairbatch/error/{y}/{group}"]) == pytest.approx(error, rel=1e-5, nan_ok=True)
    assert not [name for name in rows[0] if "/loss/" in name]
    panels = [panel.get_title() for panel in fairbatch.plot().axes]
    assert "errors of label 0" in panels
    assert "losses of label 0" not in panels


class TestMessages:
    def test_a_group_that_no_shares_can_help(self):
        """Its labels are chance: it is worse off with both, whatever it is drawn."""
        data = unfair()
        x, y, z = data.tensors
        generator = torch.Generator().manual_seed(1)
        y = torch.where(z == 1, torch.randint(2, (len(y),), generator=generator), y)
        with pytest.warns(FairBatchWarning, match=r"No composition .* label \d, group 1.*opposite things.*tolerance"):
            fitted([FairBatch("equalized_odds", groups=2)], 20, TensorDataset(x, y, z))

    def test_a_training_set_that_is_learnt_by_heart(self):
        x, y, z = unfair(200).tensors
        x = torch.column_stack([10.0 * y, x[:, 1:]])  # the label can be read off
        with pytest.warns(FairBatchWarning, match='next to no errors.*estimate="validation"'):
            fitted([FairBatch("equalized_odds", groups=2)], 40, TensorDataset(x, y, z), lr=0.1)

    @pytest.mark.filterwarnings("error::fairbatch_lightning.FairBatchWarning")
    def test_nothing_to_say_where_it_works(self):
        fitted([FairBatch("equal_opportunity", groups=2)], 20)


@pytest.mark.filterwarnings("ignore:The training set has no samples in the cells")
@pytest.mark.parametrize("criterion", ["equal_opportunity", "equalized_odds"])
def test_a_thousand_cells_of_a_few_samples_and_small_batches(criterion):
    generator = torch.Generator().manual_seed(0)
    y, z = torch.randint(20, (3000,), generator=generator), torch.randint(50, (3000,), generator=generator)
    data = TensorDataset(torch.randn(3000, 3, generator=generator), y, z)
    fairbatch = FairBatch(criterion, groups=2)
    trainer(fairbatch, max_epochs=2).fit(Linear(3, num_labels=20), DataLoader(data, batch_size=8, shuffle=True))
    assert fairbatch.shares.shape == (20, 50)
    assert fairbatch.shares.isfinite().all()
    torch.testing.assert_close(fairbatch.shares.sum(1), torch.ones(20).double())
    assert 180 <= len(fairbatch.history) <= 400
