"""Ctrl-C at any moment of an evaluation leaves the module, its gradients and the random numbers as they were."""

import signal
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from helpers import Toy, ToyModule, loader, trainer

import fairbatch_lightning
from fairbatch_lightning import ExactEstimate, FairBatch

OURS = str(Path(fairbatch_lightning.__file__).parent)


class Frozen(ToyModule):
    """Has all that an evaluation switches off for a while: modes, buffers, gradients, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        self.net[0].requires_grad_(False)
        self.net[1].eval()


def state_of(module):
    return (
        [part.training for part in module.modules()],
        [(p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in module.parameters()],
        [buffer.tolist() for buffer in module.buffers()],
        "log" in vars(module),
        torch.get_rng_state().tolist(),
        signal.getsignal(signal.SIGINT),
    )


class Interrupted:
    """Sends Ctrl-C to this process when certain lines of our code, or of contextlib, are about to run."""

    def __init__(self, *numbers):
        self.numbers, self.lines = numbers, 0

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if not (name.startswith(OURS) or name.endswith("contextlib.py")):
            return None
        if event == "line":
            self.lines += 1
            if self.lines in self.numbers:
                signal.raise_signal(signal.SIGINT)
        return self._trace


class Evaluates(L.Callback):
    """Evaluates in the middle of an epoch, where there are gradients; once for every line of our code."""

    def __init__(self, estimate, again):
        self.estimate, self.again, self.moments, self.without = estimate, again, 0, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        run = trainer.callbacks[0]._fit.run
        (module(batch[0]).sum()).backward()
        number = 0
        while True:
            before, number = state_of(module), number + 1
            interrupted = Interrupted(number, number + self.again)
            try:
                with interrupted:
                    self.estimate.measure(run, 0, uniform=True)
            except KeyboardInterrupt:
                self.moments += 1
            else:
                if interrupted.lines < number:
                    return
                self.without.append(number)
            assert state_of(module) == before, f"interrupted at line {number}"


@pytest.fixture
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own_handler")
@pytest.mark.parametrize("again", [0, 1, 6], ids="again after {} lines".format)
def test_an_interrupt_at_any_line(again):
    evaluates = Evaluates(ExactEstimate(batch_size=6), again)
    trainer(FairBatch(groups="group"), evaluates, max_epochs=1).fit(Frozen(), loader(Toy(12), batch_size=12))
    assert evaluates.moments > 100
    assert not evaluates.without
