"""The silent pass leaves no trace in the training."""

import random

import numpy as np
import pytest
import torch
import torchmetrics
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional

from fairbatch_lightning import CellLosses, Estimate, FairBatch, GroupLoss, SignedSteps


class NoisyToy(Toy):
    """Every sample uses random numbers of all three kinds, as augmentations do."""

    def __getitem__(self, index):
        x, y, index = super().__getitem__(index)
        return x + 0.01 * (torch.rand(1) + random.random() + float(np.random.rand())), y, index


class DelicateModule(ToyModule):
    """Everything an evaluation pass could disturb: BatchNorm, frozen BatchNorm, Dropout, metrics, gradients."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.BatchNorm1d(4),
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 2),
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)
        self.metric_values = []

    def on_train_epoch_start(self):
        self.net[2].eval()  # frozen, as in fine-tuning

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if self.training:
            self.batches.append(index.tolist())
        logits = self(x + 0.01 * torch.randn_like(x))
        self.accuracy(logits, y)
        loss = functional.cross_entropy(logits, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.metric_values.append(float(self.accuracy.compute()))
        self.modes = {name: part.training for name, part in self.named_modules()}


class ReturningModule(DelicateModule):
    """Hands its logits over by returning them, so that `training_step` has to run to its end."""

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if self.training:
            self.batches.append(index.tolist())
        logits = self.net(x + 0.01 * torch.randn_like(x))
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


class NoEstimate(Estimate):
    """Measures nothing: what training is like without the evaluation pass."""

    def measure(self, run, update, *, uniform):
        return CellLosses.of(GroupLoss(*run.index.shape))


def train(module, estimate, num_workers=0):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=1e-300), estimate=estimate)
    run = trainer(callback, max_epochs=3)
    generator = torch.Generator().manual_seed(1)  # the loader draws the workers' seeds from it
    run.fit(module, loader(NoisyToy(), num_workers=num_workers, generator=generator))
    state = {**module.state_dict(), "rng": torch.get_rng_state(), "numpy": torch.tensor(np.random.rand())}
    return module, callback, {**state, "python": torch.tensor(random.random())}, run


@pytest.mark.parametrize("make", [DelicateModule, ReturningModule])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_are_bit_identical_to_those_without_it(make, num_workers):
    with_pass, callback, state, run = train(make(), "exact", num_workers)
    without, _, expected, other_run = train(make(), NoEstimate(), num_workers)
    assert all(record.losses.isfinite().all() for record in callback.history)
    assert with_pass.batches == without.batches
    assert state.keys() == expected.keys()
    for name in state:
        assert torch.equal(state[name], expected[name]), name
    assert with_pass.metric_values == without.metric_values
    assert with_pass.modes == without.modes
    assert run.callback_metrics["accuracy"] == other_run.callback_metrics["accuracy"]


def test_modes_of_all_parts_are_restored():
    module, _, _, _ = train(DelicateModule(), "exact")
    assert module.modes["net.0"]
    assert not module.modes["net.2"]
    assert module.modes["net.3"]


def test_it_measures_in_evaluation_mode():
    """Losses of the whole training set, with the model as `eval()` has it."""

    class Still(DelicateModule):
        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return functional.cross_entropy(self(x), y)

    module, callback = Still(), FairBatch(groups="group", rule="paper")
    trainer(callback, max_epochs=1).fit(module, loader(batch_size=32))  # 240 is not a multiple of 32
    dataset = Toy()
    module.eval()
    with torch.no_grad():
        losses = functional.cross_entropy(module(dataset.x), dataset.targets, reduction="none")
    for y in range(2):
        for z in range(3):
            cell = (dataset.targets == y) & (dataset.group_ids == z)
            assert float(callback.history[0].losses[y, z]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)


def test_no_gradients_and_no_logs():
    class Watching(ToyModule):
        evaluated = 0

        def training_step(self, batch, batch_idx):
            if not self.training:
                Watching.evaluated += 1
                assert not torch.is_grad_enabled()
                self.log("only_in_evaluation", 1.0)
            return super().training_step(batch, batch_idx)

    run = trainer(FairBatch(groups="group", estimate="exact"), max_epochs=2)
    run.fit(Watching(), loader())
    assert Watching.evaluated == 6  # batches four times as large as those of the training
    assert "only_in_evaluation" not in run.callback_metrics


def test_it_stops_at_the_logits():
    """What comes after the forward pass, such as manual optimization, does not happen."""

    class Manual(ToyModule):
        automatic_optimization = False
        steps = 0

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            loss = functional.cross_entropy(self(x), y)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            Manual.steps += 1

    trainer(FairBatch(groups="group", estimate="exact"), max_epochs=2).fit(Manual(), loader())
    assert Manual.steps == 24


class Toggling(ToyModule):
    """Two optimizers that freeze each other's parameters while they step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.first(x) + self.second(x)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.first, self.second)]


def test_toggled_optimizers_train_on():
    module, callback = Toggling(), FairBatch(groups="group", estimate="exact")
    trainer(callback, max_epochs=3).fit(module, loader())
    assert len(callback.history) == 3
    assert all(parameter.requires_grad for parameter in module.parameters())


class Accumulating(ToyModule):
    """Clears the gradients before the forward pass of every fourth batch, and counts its steps in a buffer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if batch_idx % 4 == 0:
            self.optimizers().zero_grad()
        self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx % 4 == 3:
            self.optimizers().step()


def test_gradients_and_buffers_are_kept():
    def weights(estimate):
        module = Accumulating()
        callback = FairBatch(groups="group", rule=SignedSteps(alpha=1e-300), update_every=2, estimate=estimate)
        trainer(callback, max_epochs=2).fit(module, loader())
        return module

    with_pass, without = weights("exact"), weights(NoEstimate())
    assert torch.equal(with_pass.net.weight, without.net.weight)
    assert with_pass.steps == without.steps == 24
