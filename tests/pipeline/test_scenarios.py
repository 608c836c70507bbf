"""Every way people run a Trainer: one table of scenarios, the same assertions for each."""

import contextlib
import dataclasses
import itertools
import warnings

import lightning as L
import pytest
import torch
from canonical import EPOCHS, SCENARIOS, new_fairbatch
from helpers import Toy, loader, trainer
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.imports import RequirementCache
from modules import Base, Binary, Inner, Returns, Two, Validated
from torch.utils.data import DataLoader

from fairbatch_lightning import FairBatch, FairBatchWarning, FairSampler

ESTIMATES = ["online", pytest.param("exact", marks=pytest.mark.slow)]


def state_of(loaders):
    """Return the attributes of all loaders that a user gave, without what Lightning itself adds to them."""
    found = loaders.flattened if isinstance(loaders, CombinedLoader) else loaders
    found = found.values() if isinstance(found, dict) else found if isinstance(found, list) else [found]
    return [
        {name: value for name, value in vars(one).items() if not name.startswith("__") and name != "worker_init_fn"}
        for one in found
        if isinstance(one, DataLoader)
    ]


@pytest.fixture(scope="module")
def plain_runs():
    """The history of a plain run, for each estimate."""
    return {estimate: plain_history(estimate) for estimate in ("online", "exact")}


def plain_history(estimate):
    callback, module = new_fairbatch(estimate=estimate), Base()
    trainer(callback, max_epochs=EPOCHS).fit(module, loader())
    return callback.history


def expected_batches(history, scenario, ahead):
    """Return what the sampler draws when shares change as the history says."""
    sampler = FairSampler(Toy().targets, Toy().group, 20, drop_last=False)
    every = scenario.fairbatch.get("update_every")
    batches = []
    for epoch in range(scenario.epochs):
        sampler.set_epoch(epoch)
        stream, drawn = sampler.batches(), []
        for number in range(scenario.batches):
            while len(drawn) <= min(number + ahead, scenario.batches - 1):
                drawn.append(next(stream))
            batches.append(drawn[number])
            if every and len(batches) % every == 0:
                sampler.shares = history[len(batches) // every - 1].shares_after
        if not every:
            sampler.shares = history[epoch].shares_after
    return batches


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, estimate, plain_runs, tmp_path):
    scenario = SCENARIOS[name]
    if not (met := RequirementCache(scenario.needs)):
        pytest.skip(str(met))
    callback, module = new_fairbatch(estimate=estimate, **scenario.fairbatch), scenario.module()
    data = scenario.data() if scenario.data else None
    before = state_of(data)
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "default_root_dir": tmp_path, **scenario.trainer}
    options = {key: value for key, value in options.items() if value is not None}
    run = trainer(callback, *scenario.callbacks(), **{**options, **none_of(scenario.trainer)})
    arguments = scenario.fit(data) if scenario.fit else {"train_dataloaders": data}
    with pytest.warns(FairBatchWarning, match=scenario.warns) if scenario.warns else no_warning_of_ours():
        run.fit(module, **arguments)
    module = getattr(module, "_orig_mod", module)

    every = scenario.fairbatch.get("update_every")
    total = scenario.batches * scenario.epochs
    assert len(callback.history) == (total // every if every else scenario.epochs)
    workers = 2 * 2 if "update_every with workers" in name else 0
    assert module.batches[scenario.search :] == expected_batches(callback.history, scenario, ahead=workers)
    if scenario.same_shares:
        for record, expected in zip(callback.history, plain_runs[estimate], strict=False):
            torch.testing.assert_close(record.shares_after, expected.shares_after)
    assert not torch.equal(callback.shares, callback.history[0].shares_before) or name == "fast_dev_run"

    assert state_of(data) == before
    assert not any(part._forward_hooks for part in module.modules())
    assert "dataloader" not in vars(run.fit_loop._data_source)
    assert not {"log", "log_dict"} & set(vars(module))


@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.startswith("update_every")])
def test_scenario_with_the_bare_line(name, tmp_path):
    """Nothing but the criterion and the groups: an update after every batch, as there are fewer than 200 of them."""
    scenario = SCENARIOS[name]
    if not (met := RequirementCache(scenario.needs)):
        pytest.skip(str(met))
    callback, module = FairBatch("equalized_odds", groups="group", **scenario.fairbatch), scenario.module()
    data = scenario.data() if scenario.data else None
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "default_root_dir": tmp_path, **scenario.trainer}
    options = {key: value for key, value in options.items() if value is not None}
    run = trainer(callback, *scenario.callbacks(), **{**options, **none_of(scenario.trainer)})
    arguments = scenario.fit(data) if scenario.fit else {"train_dataloaders": data}
    with pytest.warns(FairBatchWarning, match=scenario.warns) if scenario.warns else contextlib.nullcontext():
        run.fit(module, **arguments)
    module = getattr(module, "_orig_mod", module)
    assert len(callback.history) == scenario.batches * scenario.epochs
    every = dataclasses.replace(scenario, fairbatch={"update_every": 1})
    ahead = 2 * 2 if "workers" in name else 0
    assert module.batches[scenario.search :] == expected_batches(callback.history, every, ahead)
    assert {record.unit for record in callback.history} == {"error"}
    assert not torch.equal(callback.shares, callback.history[0].shares_before)


WITH_OTHER_UPDATES = ["update_every", "update_every with workers", "val_check_interval", "fast_dev_run", "max_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WITH_OTHER_UPDATES])
def test_scenario_with_validation(name, tmp_path):
    """The losses come from the validation, whatever the training is like."""
    scenario = SCENARIOS[name]
    if not (met := RequirementCache(scenario.needs)):
        pytest.skip(str(met))
    callback, module = new_fairbatch(estimate="validation", **scenario.fairbatch), scenario.module()
    inner = getattr(module, "_orig_mod", module)
    inner.__class__ = type(type(inner).__name__, (type(inner),), {"validation_step": validation_step})
    data = scenario.data() if scenario.data else None
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "default_root_dir": tmp_path, **scenario.trainer}
    run = trainer(callback, *scenario.callbacks(), **options)
    arguments = scenario.fit(data) if scenario.fit else {"train_dataloaders": data}
    if "datamodule" not in arguments:
        collate = scenario.data().collate_fn if name in ("custom collate_fn, dict", "dataclass") else None
        arguments["val_dataloaders"] = DataLoader(Toy(seed=2), batch_size=50, collate_fn=collate)
    with pytest.warns(FairBatchWarning, match=scenario.warns) if scenario.warns else no_warning_of_ours():
        run.fit(module, **arguments)
    assert len(callback.history) == EPOCHS
    assert inner.batches[scenario.search :] == expected_batches(callback.history, scenario, ahead=0)
    assert all(record.losses.isfinite().all() for record in callback.history)


def validation_step(self, batch, batch_idx):
    """Call the model as the training does."""
    if isinstance(self, Two):
        batch = [batch, batch]
    logits = self.predict(self.unpack(batch)[0])
    return {"logits": logits} if isinstance(self, Returns) else None


def none_of(options):
    """Return the options that a scenario leaves to the Trainer's default."""
    return {key: None for key, value in options.items() if value is None}


@contextlib.contextmanager
def no_warning_of_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FairBatchWarning)
        yield


def test_updates_reach_training_after_what_workers_have_fetched():
    """num_workers * prefetch_factor batches are under way; the scenario above pins the number for two workers."""
    scenario = dataclasses.replace(SCENARIOS["update_every with workers"])
    callback, module = new_fairbatch(update_every=5), Base()
    trainer(callback, max_epochs=EPOCHS).fit(module, loader(num_workers=1, prefetch_factor=3))
    assert module.batches == expected_batches(callback.history, scenario, ahead=3)


def test_batch_size_finder_rebuilds_the_loader(tmp_path):
    class Sized(L.LightningDataModule):
        batch_size = 2

        def train_dataloader(self):
            return loader(batch_size=self.batch_size)

    callback, module, data = new_fairbatch(), Base(), Sized()
    finder = BatchSizeFinder(max_trials=4, steps_per_trial=2)
    trainer(callback, finder, max_epochs=1, default_root_dir=tmp_path).fit(module, datamodule=data)
    assert data.batch_size >= 16
    epoch = module.batches[-240 // data.batch_size :]
    assert {len(batch) for batch in epoch} == {data.batch_size}
    assert set(itertools.chain(*epoch)) == set(range(240))
    assert len(callback.history) == 1


def test_early_stopping_stops():
    callback = new_fairbatch()
    run = trainer(callback, EarlyStopping("fairbatch/gap_max", stopping_threshold=9.9), max_epochs=5)
    run.fit(Base(), loader())
    assert len(callback.history) == 1


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ["exact", "online"])
@pytest.mark.parametrize("name", ["module", "net"])
def test_training_is_compiled_as_often_as_without(name, estimate):
    """A hook that changes between steps would have everything compiled again."""

    def graphs(*callbacks):
        torch._dynamo.reset()
        compiled = []

        def backend(graph, inputs):
            compiled.append(torch.is_grad_enabled())
            return graph.forward

        module = Base() if name == "module" else Inner()
        if name == "net":
            module.net.compile(backend=backend)
        else:
            module = torch.compile(module, backend=backend)
        trainer(*callbacks, max_epochs=3).fit(module, loader())
        return sum(compiled)

    callback = new_fairbatch(logits="net" if name == "net" else None, estimate=estimate)
    assert graphs(callback) == graphs() > 0
    assert len(callback.history) == 3


def test_another_model_with_the_same_callback():
    callback, expected = new_fairbatch(), new_fairbatch()
    trainer(callback, max_epochs=2).fit(Binary(), loader())
    first, second = Base(), Base()
    trainer(callback, max_epochs=2).fit(first, loader())
    trainer(expected, max_epochs=2).fit(second, loader())
    assert first.batches == second.batches
    assert torch.equal(callback.shares, expected.shares)


def test_validate_test_and_predict_are_untouched():
    class All(Validated):
        def test_step(self, batch, batch_idx):
            self.seen = [*getattr(self, "seen", []), *batch[2].tolist()]

        def predict_step(self, batch, batch_idx):
            return batch[2]

    module, run = All(), trainer(new_fairbatch(), max_epochs=1)
    run.fit(module, loader(), DataLoader(Toy(), batch_size=40))
    run.validate(module, DataLoader(Toy(), batch_size=40), verbose=False)
    run.test(module, DataLoader(Toy(), batch_size=40), verbose=False)
    assert module.seen == list(range(240))
    predicted = run.predict(module, DataLoader(Toy(), batch_size=40))
    assert torch.cat(predicted).tolist() == list(range(240))
