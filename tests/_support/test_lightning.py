"""What is private in Lightning is where this package looks for it: a new version that moves it fails here first."""

import functools
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from helpers import Toy, ToyModule, loader, trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import CombinedLoader
from pytorch_lightning.utilities import CombinedLoader as OtherCombinedLoader
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader

from fairbatch_lightning._support import lightning as private


class Probe(pl.Callback):
    """Asks questions during a fit: before and after every batch, after validation batches and epochs."""

    def __init__(self, **questions):
        self.questions = questions
        self.answers = {name: [] for name in questions}

    def _ask(self, when, run, module):
        for name, question in self.questions.items():
            if name.startswith(when):
                self.answers[name].append(question(run, module))

    def on_train_batch_start(self, run, module, *_):
        self._ask("start", run, module)

    def on_train_batch_end(self, run, module, *_):
        self._ask("batch", run, module)

    def on_validation_batch_end(self, run, module, *_):
        self._ask("validation", run, module)

    def on_train_epoch_end(self, run, module):
        self._ask("epoch", run, module)


class Recorder(Logger):
    """Remembers at which steps Lightning logs the loss of a batch."""

    name, version = "recorder", 0

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_metrics(self, metrics, step=None):
        if "train_loss" in metrics:
            self.steps.append(step)

    def log_hyperparams(self, *_, **__):
        pass


class Validated(ToyModule):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])


class Fetches(ToyModule):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter):
        (x, y, _), _, _ = next(dataloader_iter)
        return functional.cross_entropy(self(x), y)


class TestLoaders:
    def test_the_train_loader_is_replaced_until_that_is_undone(self):
        run, module, asked = trainer(max_epochs=1), ToyModule(), []

        def other(given):
            asked.append(given)
            return DataLoader(Toy(), batch_size=60)

        class Replaces(pl.Callback):
            def setup(self, run, module, stage):
                self.undo = private.replace_train_loader(run, other)

            def teardown(self, run, module, stage):
                self.undo()
                self.undo()  # twice does no harm

        given, run.callbacks = loader(), [*run.callbacks, Replaces()]
        run.fit(module, given)
        assert asked == [given]
        assert module.batches == [list(range(i, i + 60)) for i in range(0, 240, 60)]
        assert "dataloader" not in vars(run.fit_loop._data_source)
        assert run.fit_loop._data_source.instance is given

    @pytest.mark.parametrize("combined", [CombinedLoader, OtherCombinedLoader])
    def test_combined_loaders_of_both_namespaces(self, combined):
        assert private.is_combined(combined([loader()], "min_size"))
        assert private.combined_mode(combined([loader()], "min_size")) == "min_size"

    @pytest.mark.parametrize("other", [loader(), [loader()], {"iterables": 1, "flattened": 2}])
    def test_what_is_not_combined(self, other):
        assert not private.is_combined(other)

    def test_loaders_of_a_validation(self):
        held_out = [DataLoader(Toy(40), batch_size=20), DataLoader(Toy(20), batch_size=20)]
        probe = Probe(
            validation_loaders=lambda run, _: private.held_out_loaders(run),
            validation_mode=lambda run, _: private.held_out_mode(run),
        )
        trainer(probe, max_epochs=1, num_sanity_val_steps=0).fit(Validated(), loader(), held_out)
        assert probe.answers["validation_mode"] == ["sequential"] * 3
        for found in probe.answers["validation_loaders"]:
            assert [one.dataset for one in found] == [one.dataset for one in held_out]


class TestProgress:
    def test_counts_of_batches_and_steps(self):
        probe = Probe(
            start_trained=lambda run, _: private.batches_trained_on(run),
            batch_trained=lambda run, _: private.batches_trained_on(run),
            batch_fetches=lambda run, _: private.fetches_itself(run),
            epoch_trained=lambda run, _: private.batches_trained_on(run),
        )
        trainer(probe, max_epochs=2, limit_train_batches=3).fit(ToyModule(), loader())
        assert probe.answers["start_trained"] == [0, 1, 2] * 2
        assert probe.answers["batch_trained"] == [1, 2, 3] * 2
        assert probe.answers["epoch_trained"] == [3, 3]
        assert probe.answers["batch_fetches"] == [False] * 6

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_the_step_to_log_at_is_lightnings_own(self, accumulate):
        probe, logger = Probe(batch_step=lambda run, _: private.step_to_log_at(run)), Recorder()
        settings = {"limit_train_batches": 4, "log_every_n_steps": 1, "accumulate_grad_batches": accumulate}
        trainer(probe, max_epochs=2, logger=logger, **settings).fit(ToyModule(), loader())
        assert sorted(set(probe.answers["batch_step"])) == logger.steps
        assert len(logger.steps) == 8 // accumulate

    def test_worker_processes_that_fetch_ahead_do_not_count(self):
        probe = Probe(batch_trained=lambda run, _: private.batches_trained_on(run))
        trainer(probe, max_epochs=1, limit_train_batches=3).fit(ToyModule(), loader(num_workers=2, prefetch_factor=3))
        assert probe.answers["batch_trained"] == [1, 2, 3]

    def test_a_step_that_takes_its_batches_itself(self):
        probe = Probe(batch_fetches=lambda run, _: private.fetches_itself(run))
        trainer(probe, max_epochs=1, limit_train_batches=2).fit(Fetches(), loader())
        assert probe.answers["batch_fetches"] == [True, True]

    def test_one_process_has_all_samples(self):
        assert private.processes_of(trainer()) == {"num_replicas": 1, "rank": 0}

    def test_several_processes_share_them(self):
        several = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 4, "rank": 2})
        assert private.processes_of(several) == {"num_replicas": 4, "rank": 2}

    def test_weights_are_whole_in_ordinary_training(self):
        assert not private.shards_weights(trainer())
        sharded = SimpleNamespace(strategy=pl.strategies.FSDPStrategy())
        assert private.shards_weights(sharded)
        other = SimpleNamespace(strategy=pytorch_lightning.strategies.ModelParallelStrategy())
        assert private.shards_weights(other)


class TestSteps:
    @pytest.mark.parametrize("kind", [ToyModule, Fetches])
    def test_a_step_can_be_called_as_lightning_does(self, kind):
        """The loss is that of the batch, whatever arguments the step takes."""
        batch = next(iter(DataLoader(Toy(), batch_size=7)))

        def ask(run, module):
            step, arguments = private.training_step_of(run, module, batch, 0)
            x, y, _ = batch
            with private.shadowed(module, log=lambda *_, **__: None), torch.no_grad():
                return float(step(*arguments)), float(functional.cross_entropy(module(x), y))

        probe = Probe(batch_loss=ask)
        trainer(probe, max_epochs=1, limit_train_batches=2).fit(kind(), loader())
        (first, expected), (second, again) = probe.answers["batch_loss"]
        assert (first, second) == pytest.approx((expected, again))
        assert first != second

    def test_batches_go_through_the_modules_own_hooks(self):
        class Scales(ToyModule):
            def on_before_batch_transfer(self, batch, dataloader_idx):
                return [batch[0] * 0, *batch[1:]]

        batch = next(iter(DataLoader(Toy(), batch_size=7)))
        seen = Probe(batch_x=lambda run, module: next(iter(private.training_step_of(run, module, batch, 0)[1]))[0])
        trainer(seen, max_epochs=1, limit_train_batches=1).fit(Scales(), loader())
        assert not seen.answers["batch_x"][0].any()
        assert batch[0].any()

    def test_compiled_modules(self):
        assert not private.is_compiled(ToyModule())
        compiled = ToyModule()
        compiled._compiler_ctx = {"compiler": "dynamo"}
        assert private.is_compiled(compiled)
        compiled.training_step = lambda *_: pytest.fail("the compiled step was called")
        run = SimpleNamespace(
            precision_plugin=SimpleNamespace(convert_input=lambda batch: batch),
            strategy=SimpleNamespace(batch_to_device=lambda batch, dataloader_idx: batch),
            fit_loop=trainer().fit_loop,
        )
        run.fit_loop.trainer.strategy._lightning_module = compiled
        step, _ = private.training_step_of(run, compiled, None, 0)
        assert isinstance(step, functools.partial)
        assert step.func is ToyModule.training_step

    def test_toggled_parameters_are_kept(self):
        module = ToyModule()
        first, second = (torch.optim.SGD([weight], 0.1) for weight in module.parameters())
        module._trainer = SimpleNamespace(optimizers=[first, second])
        module.optimizers = lambda **_: [first, second]
        module.toggle_optimizer(first)
        before = dict(module._param_requires_grad_state)
        assert before
        with private.toggled_parameters_kept(module):
            module.untoggle_optimizer(first)
            module._param_requires_grad_state.clear()
        assert module._param_requires_grad_state == before


class Thing:
    colour = "of the class"


class TestShadowed:
    def test_attributes_are_other_for_a_while(self):
        thing = Thing()
        thing.size = 3
        with private.shadowed(thing, colour="other", size=5, new=1):
            assert (thing.colour, thing.size, thing.new) == ("other", 5, 1)
        assert vars(thing) == {"size": 3}
        assert thing.colour == "of the class"

    def test_also_after_an_error(self):
        thing = Thing()

        def fail():
            with private.shadowed(thing, colour="other"):
                raise KeyError("out of luck")

        with pytest.raises(KeyError, match="out of luck"):
            fail()
        assert vars(thing) == {}

    def test_behind_the_back_of_the_class(self):
        """A module would register a submodule that is set the usual way."""
        module, other = ToyModule(), torch.nn.Linear(4, 2)
        with private.shadowed(module, probe=other):
            assert module.probe is other
            assert "probe" not in dict(module.named_modules())
        assert not hasattr(module, "probe")


@pytest.mark.parametrize(
    ("strategy", "spawned"), [("ddp_spawn", True), ("ddp_fork", False), ("ddp", False), ("auto", False)]
)
def test_what_starts_processes_is_known(strategy, spawned):
    assert private.is_spawned(trainer(strategy=strategy, devices=1 if strategy == "auto" else 2)) == spawned
    other = pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    assert private.is_spawned(other) == spawned


def test_a_refused_loader_leaves_nothing_patched():
    """Lightning patches DataLoader while it asks for one, and forgets to undo it if that fails."""
    patched = [cls.__init__ for cls in (DataLoader, BatchSampler)]

    def refuse(given):
        raise ValueError("not this one")

    class Refusing(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            private.replace_train_loader(trainer, refuse)

    with pytest.raises(ValueError, match="not this one"):
        trainer(Refusing()).fit(ToyModule(), loader())
    assert [cls.__init__ for cls in (DataLoader, BatchSampler)] == patched
    assert not any(name.startswith("__old") for name in vars(DataLoader))
