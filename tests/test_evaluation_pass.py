"""The exact estimate measures the right thing and leaves no trace in the training."""

import functools
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchmetrics
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from fairbatch_lightning import Estimate, FairBatch, GroupIndex, GroupLoss
from fairbatch_lightning.estimate import TrainingRun

exact = functools.partial(FairBatch, estimate="exact")


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

    def measure(self, run):
        return GroupLoss(*run.index.shape)


def train(module, estimate, num_workers=0):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    callback = FairBatch(groups="group", alpha=1e-300, estimate=estimate)
    run = trainer(callback, max_epochs=3)
    generator = torch.Generator().manual_seed(1)  # the loader draws the workers' seeds from it
    run.fit(module, loader(NoisyToy(), num_workers=num_workers, generator=generator))
    state = {**module.state_dict(), "rng": torch.get_rng_state(), "numpy": torch.tensor(np.random.rand())}
    return module, callback, {**state, "python": torch.tensor(random.random())}, run


@pytest.mark.parametrize("make", [DelicateModule, ReturningModule])
@pytest.mark.parametrize("num_workers", [0, 2])
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

    module, callback = Still(), exact(groups="group")
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

    run = trainer(exact(groups="group"), max_epochs=2)
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

    trainer(exact(groups="group"), max_epochs=2).fit(Manual(), loader())
    assert Manual.steps == 24


def test_fast_dev_run_is_fast():
    seen = []

    class Counting(ToyModule):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    trainer(exact(groups="group"), fast_dev_run=2).fit(Counting(), loader())
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("head", "unpack"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0)), lambda out: out),
        (lambda: torch.nn.Linear(4, 1), lambda out: out.squeeze(1)),
        (lambda: WithLogits(), lambda out: out["logits"].squeeze(1)),
    ],
    ids=["(B,)", "(B, 1)", "dict"],
)
def test_binary_heads(head, unpack):
    class Binary(ToyModule):
        def __init__(self):
            super().__init__()
            self.net = head()

        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return functional.binary_cross_entropy_with_logits(unpack(self(x)), y.float())

    module, callback = Binary(), exact(groups="group")
    trainer(callback, max_epochs=1).fit(module, loader())
    dataset = Toy()
    with torch.no_grad():
        logits = unpack(module(dataset.x))
        losses = functional.binary_cross_entropy_with_logits(logits, dataset.targets.float(), reduction="none")
    cell = (dataset.targets == 1) & (dataset.group_ids == 2)
    assert float(callback.history[0].losses[1, 2]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)


class WithLogits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"logits": self.linear(x), "features": x}


def test_logits_of_a_named_submodule():
    class Inner(ToyModule):
        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return functional.cross_entropy(self.net(x), y)

    callback = exact(groups="group", logits="net")
    trainer(callback, max_epochs=1).fit(Inner(), loader())
    assert callback.history[0].losses.isfinite().all()


def test_logits_of_a_submodule_that_is_built_late():
    class Late(ToyModule):
        def __init__(self):
            super().__init__()
            del self.net

        def configure_model(self):
            self.net = torch.nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return functional.cross_entropy(self.net(x), y)

    callback = exact(groups="group", logits="net")
    trainer(callback, max_epochs=1).fit(Late(), loader())
    assert len(callback.history) == 1


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float64), ("cpu", torch.float64), ("mps", torch.float32)])
def test_measurements_live_on_the_modules_device(device, dtype, monkeypatch):
    """Apple's devices have no float64."""
    moved = []
    monkeypatch.setattr(GroupLoss, "to", lambda self, where: moved.append(where) or self)
    module = SimpleNamespace(device=torch.device(device))
    run = TrainingRun(None, module, None, GroupIndex.from_values([0, 1], [0, 1]), None, None)
    assert run.new_metric().sums.dtype == dtype
    assert moved == [torch.device(device)]


@pytest.mark.slow
def test_real_googlenet():
    models = pytest.importorskip("torchvision.models")

    class GoogLeNet(ToyModule):
        def __init__(self):
            super().__init__()
            self.net = models.googlenet(num_classes=2, init_weights=False)

        def training_step(self, batch, batch_idx):
            x, y = batch
            output = self(x)
            heads = (output.logits, output.aux_logits1, output.aux_logits2) if self.training else (output,)
            return sum(functional.cross_entropy(head, y) for head in heads)

    data = torch.utils.data.TensorDataset(torch.rand(24, 3, 64, 64), torch.arange(24) % 2)
    callback = exact(groups=[i % 3 for i in range(24)])
    trainer(callback, max_epochs=1).fit(GoogLeNet(), torch.utils.data.DataLoader(data, batch_size=6))
    assert callback.history[0].losses.isfinite().all()


def test_precision_of_the_training_is_used():
    dtypes = []

    class Watching(ToyModule):
        def forward(self, x):
            out = super().forward(x)
            dtypes.append((self.training, out.dtype))
            return out

    callback = exact(groups="group")
    trainer(callback, max_epochs=1, precision="bf16-mixed").fit(Watching(), loader())
    assert set(dtypes) == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert callback.history[0].losses.dtype == torch.float64


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
    module, callback = Toggling(), exact(groups="group")
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
        callback = FairBatch(groups="group", alpha=1e-300, update_every=2, estimate=estimate)
        trainer(callback, max_epochs=2).fit(module, loader())
        return module

    with_pass, without = weights("exact"), weights(NoEstimate())
    assert torch.equal(with_pass.net.weight, without.net.weight)
    assert with_pass.steps == without.steps == 24


class SlowStart(Toy):
    """Its first samples take long, so that a second worker overtakes the first."""

    def __getitem__(self, index):
        time.sleep(0.05 if index < 20 else 0)
        return super().__getitem__(index)


def test_batches_are_told_apart_when_workers_overtake_each_other():
    expected, callback = exact(groups="group"), exact(groups="group")
    trainer(expected, max_epochs=1).fit(ToyModule(), loader())
    trainer(callback, max_epochs=1).fit(ToyModule(), loader(SlowStart(), num_workers=2, in_order=False))
    torch.testing.assert_close(callback.history[0].losses, expected.history[0].losses)


def test_returned_logits_win_over_the_modules_output():
    class Embedding(ToyModule):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(2, 2)

        def training_step(self, batch, batch_idx):
            logits = self.head(self(batch[0]))
            return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

    module, callback, dataset = Embedding(), exact(groups="group"), Toy()
    trainer(callback, max_epochs=1).fit(module, loader())
    with torch.no_grad():
        losses = functional.cross_entropy(module.head(module(dataset.x)), dataset.targets, reduction="none")
    cell = (dataset.targets == 1) & (dataset.group_ids == 2)
    assert float(callback.history[0].losses[1, 2]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)


def test_modules_that_cannot_take_a_single_sample():
    """241 samples leave one for the last batch: it is filled up, and the filling not counted."""

    class Squeezing(ToyModule):
        def forward(self, x):
            return self.net(x).diff().squeeze()

        def training_step(self, batch, batch_idx):
            return functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float())

    module, callback, dataset = Squeezing(), exact(groups="group"), Toy(241)
    trainer(callback, max_epochs=1).fit(module, DataLoader(dataset, batch_size=20, shuffle=True, drop_last=True))
    with torch.no_grad():
        losses = functional.binary_cross_entropy_with_logits(
            module(dataset.x), dataset.targets.float(), reduction="none"
        )
    for y in range(2):
        for z in range(3):
            cell = (dataset.targets == y) & (dataset.group_ids == z)
            assert float(callback.history[0].losses[y, z]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)
