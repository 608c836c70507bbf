"""What holds for every estimate."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch
from estimating import Recording, WithValidation, bare_run, cell_means, fit, held_out
from helpers import Toy, loader, trainer

from fairbatch_lightning import (
    CellLosses,
    Estimate,
    ExactEstimate,
    FairBatch,
    GroupIndex,
    GroupLoss,
    OnlineEstimate,
    SampledEstimate,
    TrainingRun,
    ValidationEstimate,
)


@pytest.mark.parametrize("make", [SampledEstimate, OnlineEstimate])
@pytest.mark.parametrize("number", [0, -1, 2.5, True, "many"])
def test_bad_numbers_of_samples_are_refused(make, number):
    with pytest.raises(ValueError, match=f"`samples_per_cell` to be an integer of at least 1 but got {number!r}"):
        make(number)


@pytest.mark.parametrize("make", [SampledEstimate, OnlineEstimate, ExactEstimate])
@pytest.mark.parametrize("size", [0, 1.5, "big"])
def test_bad_batch_sizes_are_refused(make, size):
    with pytest.raises(ValueError, match=f"`batch_size` to be an integer of at least 1 but got {size!r}"):
        make(batch_size=size)


def test_estimate_of_ones_own():
    """Such as one that only looks at the last batch before an update."""

    class LastBatch(Estimate):
        watches_training = True

        def observe(self, run, logits, cells):
            self.metric = run.new_metric()
            run.add_losses(self.metric, logits, cells)

        def measure(self, run, update, *, uniform):
            return CellLosses.of(self.metric)

    module = Recording()
    callback = fit(module, estimate=LastBatch(), epochs=2)
    for record, passes in zip(callback.history, module.epochs(), strict=True):
        expected, _ = cell_means(passes[-1:], Toy())
        torch.testing.assert_close(record.losses, expected, equal_nan=True)


@pytest.mark.parametrize("make", [ExactEstimate, SampledEstimate, OnlineEstimate, ValidationEstimate])
def test_a_used_callback_can_be_pickled(make):
    callback = FairBatch(groups="group", estimate=make())
    trainer(callback, max_epochs=1).fit(WithValidation(), loader(), held_out())
    again = copy.deepcopy(pickle.loads(pickle.dumps(callback)))
    trainer(again, max_epochs=1).fit(WithValidation(), loader(), held_out())
    assert torch.equal(again.history[0].losses, callback.history[0].losses)


def test_an_estimate_object_can_be_used_again():
    estimate = OnlineEstimate(samples_per_cell=4)
    first, again = fit(Recording(), estimate=estimate), fit(Recording(), estimate=estimate)
    for record, expected in zip(again.history, first.history, strict=True):
        assert torch.equal(record.losses, expected.losses)


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float64), ("cpu", torch.float64), ("mps", torch.float32)])
def test_measurements_live_on_the_modules_device(device, dtype, monkeypatch):
    """Apple's devices have no float64."""
    moved = []
    monkeypatch.setattr(GroupLoss, "to", lambda self, where: moved.append(where) or self)
    module = SimpleNamespace(device=torch.device(device))
    run = TrainingRun(None, module, None, GroupIndex.from_values([0, 1], [0, 1]), None, None)
    assert run.new_metric().sums.dtype == dtype
    assert moved == [torch.device(device)]


def metric_of(losses, cells, shape=(2, 2)):
    metric = GroupLoss(*shape)
    metric.add(torch.tensor(losses), torch.tensor(cells))
    return metric


def test_what_was_measured_is_means_and_counts():
    measured = CellLosses.of(metric_of([1.0, 2.0, 6.0], [0, 0, 3]))
    torch.testing.assert_close(
        measured.means, torch.tensor([[1.5, torch.nan], [torch.nan, 6.0]]).double(), equal_nan=True
    )
    assert measured.counts.tolist() == [[2, 0], [0, 1]]


def test_what_was_measured_stays_when_the_metric_goes_on():
    metric = metric_of([1.0], [0])
    measured = CellLosses.of(metric)
    metric.add(torch.tensor([5.0, 5.0]), torch.tensor([0, 1]))
    metric.counts.zero_()
    assert measured.counts.tolist() == [[1, 0], [0, 0]]
    assert float(measured.means[0, 0]) == 1


def test_losses_are_added_to_their_cells_without_waiting_for_the_device():
    """The meta device has no values: whoever asks it for one gets an error, as the measurement itself does."""
    run = bare_run("cpu")
    logits, cells = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)), run.index.cells[:20]
    metric = run.new_metric()
    run.add_losses(metric, logits, cells)
    losses = torch.nn.functional.cross_entropy(logits, Toy().targets[:20], reduction="none").double().tolist()
    expected, counts = cell_means([(True, list(range(20)), losses)], Toy())
    assert torch.equal(metric.counts, counts.long())
    torch.testing.assert_close(CellLosses.of(metric).means, expected, equal_nan=True)
    run = bare_run("meta")
    metric = run.new_metric()
    run.add_losses(metric, logits.to("meta"), cells)
    assert metric.sums.is_meta
    with pytest.raises(NotImplementedError, match="meta"):
        CellLosses.of(metric)


def test_what_an_estimate_works_with_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        bare_run("cpu").seed = 1


@pytest.mark.parametrize(("world_size", "num_replicas", "copies"), [(1, 1, 1), (4, 4, 1), (4, 2, 2)])
def test_copies_are_processes_that_see_the_same_samples(world_size, num_replicas, copies):
    assert bare_run("cpu", SimpleNamespace(world_size=world_size), num_replicas=num_replicas).copies == copies


def test_an_estimate_needs_nothing_but_a_measurement():
    class Constant(Estimate):
        def measure(self, run, update, *, uniform):
            return CellLosses(torch.arange(6.0).view(2, 3) + update, torch.ones(2, 3))

    with pytest.raises(TypeError, match="measure"):
        Estimate()
    callback = fit(Recording(), estimate=Constant())
    assert [float(record.losses[0, 0]) for record in callback.history] == [0, 1, 2]
