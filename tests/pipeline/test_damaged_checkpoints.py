"""A checkpoint that is damaged, altered or of another version is refused before training, with a word on what is wrong.

Or it can be gone on from; but training never hangs, and never fails later or for reasons that nobody understands.
"""

import copy
import signal
import warnings
from contextlib import contextmanager

import lightning as L
import pytest
import torch
from canonical import CALLBACKS
from evaluated import Evaluated, held_out
from helpers import Toy, ToyModule, loader, trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairbatch_lightning import FairBatch, FairBatchWarning, FairnessMonitor, FairSampler
from fairbatch_lightning.fairness import FairnessRecord

METHODS = {
    "adaptive": lambda: FairBatch(groups="group", update_every=2, importance="loss"),
    "exact": lambda: CALLBACKS["exact"](),
    "online": lambda: CALLBACKS["online"](),
    **{name: CALLBACKS[name] for name in ("cutting", "group dro", "adversary", "reweighing")},
}


class Save(L.Callback):
    """Keeps the state of another callback in the middle of an epoch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            self.state = copy.deepcopy(trainer.callbacks[0].state_dict())


class Restore(L.Callback):
    """Loads a state into another callback where Lightning does it."""

    def __init__(self, state):
        self.state = state

    def on_fit_start(self, trainer, module):
        trainer.callbacks[0].load_state_dict(self.state)


def fit(callback, other, module=None, validation=None):
    data = loader(Toy(60))
    trainer(callback, other, max_epochs=2, num_sanity_val_steps=0).fit(module or ToyModule(), data, validation)


def saved(method):
    fit(METHODS[method](), save := Save())
    return save.state


def paths(value, here=()):
    """Return the way to every entry."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [here] * bool(here) + [path for key, part in items for path in paths(part, (*here, key))]


def changed(value, path, change):
    """Return a copy in which an entry is another, or is gone."""
    key, *rest = path
    whole = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        whole[key] = changed(whole[key], rest, change)
    elif (new := change(whole[key])) is GONE:
        del whole[key]
    else:
        whole[key] = new
    return whole if isinstance(value, dict) else type(value)(whole)


NOT_NEEDED = "weights", "param_groups", *torch.optim.Adam([torch.ones(1)]).param_groups[0]
GONE = object()
OTHERS = [None, True, "", "words", b"", [], {}, (), -1, 0, 1, 7, 10**18, -(10**18), 10**400, 0.5, -2.5, 1e300]
OTHERS += [float("nan"), float("inf"), -float("inf"), [[1, 2], [3]], {"a": 1}, {1: 2}, torch.zeros(()), torch.ones(3)]
OTHERS += [torch.zeros(2, 3), torch.full((2, 3), torch.nan), torch.ones(2, 3, dtype=torch.bool), torch.zeros(0)]
OTHERS += [torch.ones(2, 3, dtype=torch.complex64), torch.ones(2, 3).to_sparse(), torch.zeros(2, 3, device="meta")]
CHANGES = [lambda _: GONE, *(lambda _, other=other: copy.deepcopy(other) for other in OTHERS)]


def of_tensors(change):
    return lambda value: change(value.clone()) if isinstance(value, torch.Tensor) and value.numel() else GONE


CHANGES += [
    of_tensors(lambda value: value[:-1] if value.ndim else value.unsqueeze(0)),
    of_tensors(lambda value: value.unsqueeze(0)),
    of_tensors(lambda value: -value - 1 if value.dtype != torch.bool else value),
    of_tensors(lambda value: value.fill_(float("nan")) if value.is_floating_point() else value.fill_(-5)),
    of_tensors(lambda value: value.fill_(float("inf")) if value.is_floating_point() else value.fill_(2**62)),
    of_tensors(lambda value: value.to(torch.bfloat16)),
    of_tensors(lambda value: value * 1e30),
    lambda value: value[:-1] if isinstance(value, list | tuple | str) else GONE,
    lambda value: [*value, *value] if isinstance(value, list | tuple) else GONE,
    lambda value: {**value, "more": 1} if isinstance(value, dict) else GONE,
    lambda value: value + 1 if isinstance(value, int | float) else GONE,
]


@contextmanager
def no_hanging(seconds=20):
    """End what never ends by itself."""

    def end(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused_or_right(callback, state, path, module):
    """Return whether it is gone on from."""
    try:
        with no_hanging(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FairBatchWarning)  # such as that the rest of the epoch is drawn anew
            fit(callback, Restore(state), module)
    except BaseException as error:
        clear = isinstance(error, ValueError) and "the checkpoint" in str(error)
        if clear and module.batches == []:
            return False
        late = f"after {len(module.batches)} batches"
        raise AssertionError(f"{path} = {value_at(state, path)!r} ends {late} in {error!r}") from error
    return True


def value_at(state, path):
    try:
        for key in path:
            state = state[key]
    except (KeyError, IndexError):
        return "(gone)"
    return state


@pytest.fixture(scope="module")
def states():
    return {method: saved(method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_every_entry_can_be_missing(method, states):
    """As in a checkpoint of an earlier version. What is not needed may be."""
    for path in paths(states[method]):
        module = ToyModule()
        state = changed(states[method], path, lambda _: GONE)
        goes_on = refused_or_right(METHODS[method](), state, path, module)
        assert not goes_on or path[-1] in NOT_NEEDED or not isinstance(path[-1], str), path


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_entry_that_is_another(method, states):
    places = paths(states[method])

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(places), st.sampled_from(CHANGES))
    def check(path, change):
        refused_or_right(METHODS[method](), changed(states[method], path, change), path, ToyModule())

    check()


@pytest.mark.parametrize("method", METHODS)
def test_states_as_they_were_are_gone_on_from(method, states):
    assert refused_or_right(METHODS[method](), copy.deepcopy(states[method]), (), ToyModule())


@pytest.mark.parametrize("state", [None, [], 3, "words", torch.ones(3), {"history": 3}, {1: 2}])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_no_state_at_all(method, state):
    refused_or_right(METHODS[method](), state, (), ToyModule())


def test_the_monitor():
    monitor = FairnessMonitor(groups="group")
    fit(monitor, Save(), Evaluated(), held_out())
    state = monitor.state_dict()
    again = FairnessMonitor(groups="group")
    again.setup(trainer(), ToyModule(), "fit")
    for path in paths(state):
        for change in CHANGES:
            try:
                again.load_state_dict(changed(state, path, change))
            except ValueError as error:
                if "in the checkpoint" not in str(error):
                    raise
            else:
                assert all(isinstance(record, FairnessRecord) for record in again.history)


def test_a_sampler_of_its_own():
    """In plain PyTorch; the message says which entry, and what was expected."""
    labels = torch.arange(40) % 2
    sampler = FairSampler(labels, labels, 4)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match=r"`next_batch` in .* a whole number from 0 to 10 but got 10*\."):
        sampler.load_state_dict({**state, "next_batch": 10**18})
    del state["num_batches"]
    with pytest.raises(
        ValueError, match=r"Expected `num_batches` in the checkpoint but there is none.*another version"
    ):
        sampler.load_state_dict(state)
    assert len(list(sampler)) == 40
