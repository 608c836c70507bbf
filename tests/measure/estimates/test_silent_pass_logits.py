"""The silent pass measures the logits that training computes, whatever the module looks like."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from estimating import bare_run
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional

from fairbatch_lightning import FairBatch
from fairbatch_lightning.measure.estimates.silent_pass import check_can_evaluate, needs_whole_step
from fairbatch_lightning.measure.logits import LogitsReader

exact = functools.partial(FairBatch, rule="paper")


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


def run_with(strategy, automatic=True, returns=False):
    """Return as much of a run as decides about how far `training_step` has to go."""
    module = ToyModule()
    module.automatic_optimization = automatic
    reader = LogitsReader("FairBatch")
    reader.attach(module)
    reader.training_step_returns = returns
    run = bare_run("cpu", SimpleNamespace(strategy=type(strategy, (), {})(), world_size=1))
    return replace(run, module=module, reader=reader)


def test_how_far_the_step_has_to_go():
    assert not needs_whole_step(run_with("DDPStrategy"))
    assert needs_whole_step(run_with("DDPStrategy", returns=True))
    assert needs_whole_step(run_with("FSDPStrategy"))
    for automatic in (True, False):  # under manual optimization the whole step would train the model
        run = run_with("DDPStrategy", automatic)
        run.module.compile(backend="eager")
        assert needs_whole_step(run) is automatic


def test_steps_that_must_not_run_to_their_end_but_would_have_to_are_refused():
    for strategy, automatic in (("DDPStrategy", True), ("DDPStrategy", False), ("FSDPStrategy", True)):
        check_can_evaluate(run_with(strategy, automatic))
    with pytest.raises(RuntimeError, match="With FSDPStrategy FairBatch has to run `training_step` to its end"):
        check_can_evaluate(run_with("FSDPStrategy", automatic=False))
