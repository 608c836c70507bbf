"""What holds for every baseline that adds to the loss."""

import functools
import itertools

import pytest
import torch
from baseline_methods import CHANGE_LOSS
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fairbatch_lightning.callbacks.baselines import LossChanging
from fairbatch_lightning.measure.per_sample import error

every_method = pytest.mark.parametrize("new", CHANGE_LOSS.values(), ids=CHANGE_LOSS)


@every_method
def test_manual_optimization_is_refused(new):
    module = ToyModule()
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match="Use automatic optimization"):
        trainer(new()).fit(module, loader())


@every_method
def test_logits_out_of_reach(new):
    class Hidden(ToyModule):
        def forward(self, x):
            return {"scores": self.net(x)}

        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self(batch[0])["scores"], batch[1])

    with pytest.raises(RuntimeError, match=r"found no logits.*\(logits=\"net\"\)"):
        trainer(new()).fit(Hidden(), loader())
    run = trainer(new(logits="net"), max_epochs=1)
    run.fit(Hidden(), loader())
    assert run.global_step == 12


class Unsized(IterableDataset):
    """Next to a loader of this Lightning fetches a batch ahead."""

    def __iter__(self):
        return iter(torch.zeros(12, 1))


@pytest.mark.parametrize(
    "kind",
    ["steps take the loader", "a batch is left out", "validation uses the step", "validation with a batch ahead"],
)
def test_losses_are_those_of_the_batch(kind):
    """However Lightning comes by its batches: the cells are those of the samples that are trained on."""
    toy, seen = Toy(), []

    class Checked(LossChanging):
        def loss_term(self, logits, losses, cells):
            seen.append((losses.detach(), cells))
            return 0 * losses.mean()

    class Module(ToyModule):
        def __init__(self):
            super().__init__()
            self.expected = []

        def loss(self, batch):
            x, y, index = batch
            logits = self(x)
            if self.training:
                self.batches.append(index.tolist())
                losses = functional.cross_entropy(logits, y, reduction="none")
                self.expected.append((losses.detach(), y * 3 + toy.group_ids[index]))
            return functional.cross_entropy(logits, y)

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    class TakesLoader(Module):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    class Validates(Module):
        def validation_step(self, batch, batch_idx):
            self.training_step(batch, batch_idx)

    class Ahead(Module):
        def training_step(self, batch, batch_idx):
            return self.loss(batch[0])

        def validation_step(self, batch, batch_idx):
            self.training_step([batch], batch_idx)

    numbers = itertools.count()

    def leave_out(samples):
        return None if next(numbers) == 2 else default_collate(samples)

    modules = {"steps take the loader": TakesLoader, "validation uses the step": Validates}
    module = {**modules, "validation with a batch ahead": Ahead}.get(kind, Module)()
    data = loader(toy, collate_fn=leave_out if kind == "a batch is left out" else None)
    if kind == "validation with a batch ahead":
        data = [data, DataLoader(Unsized(), batch_size=1)]
    validates = kind.startswith("validation")
    options = {"val_check_interval": 2} if validates else {}
    held_out = DataLoader(Toy(40), batch_size=20) if validates else None
    callback = Checked(groups="group", loader=0 if isinstance(data, list) else None)
    trainer(callback, max_epochs=2, **options).fit(module, data, held_out)
    assert len(seen) == len(module.expected) > 10
    for (losses, cells), (expected, own) in zip(seen, module.expected, strict=True):
        assert torch.equal(cells, own)
        torch.testing.assert_close(losses, expected)


@every_method
def test_returned_logits_come_before_those_of_the_module(new):
    class Features(ToyModule):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x)

        def training_step(self, batch, batch_idx):
            logits = self.net(self(batch[0]))
            return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

    class Direct(Features):
        def forward(self, x):
            return self.net(self.first(x))

        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self(batch[0]), batch[1])

    modules = [Features(), Direct()]
    for module in modules:
        trainer(new(), max_epochs=1).fit(module, loader())
    torch.testing.assert_close(modules[0].net.weight, modules[1].net.weight)


@every_method
def test_logits_without_a_gradient(new):
    class Detached(ToyModule):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits.detach()}

    with pytest.raises(RuntimeError, match="gradient is lost"):
        trainer(new()).fit(Detached(), loader())
    with pytest.raises(RuntimeError, match="`loss` that can be differentiated"):
        trainer(new(loss=error)).fit(ToyModule(), loader())
    with pytest.raises(ValueError, match=r"`loss` of \w+ to be None or a function .* that can be differentiated"):
        new(loss="error")


@every_method
def test_submodules_that_are_built_late_and_steps_that_are_wrapped(new):
    def wrapped(step):
        @functools.wraps(step)
        def inner(self, *arguments):
            return step(self, *arguments)

        return inner

    class Late(ToyModule):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            self.net = torch.nn.Linear(4, 2)

        @wrapped
        def training_step(self, batch):
            return functional.cross_entropy(self.net(batch[0]), batch[1])

    run = trainer(new(logits="net"), max_epochs=1)
    run.fit(Late(), loader())
    assert run.global_step == 12


@every_method
def test_logits_and_loss_in_a_dict(new):
    class InDict(ToyModule):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

    plain, other = ToyModule(), InDict()
    for module in (plain, other):
        trainer(new(), max_epochs=1).fit(module, loader())
    torch.testing.assert_close(plain.net.weight, other.net.weight)
