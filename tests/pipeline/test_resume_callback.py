"""A callback that is resumed goes on as if nothing had happened."""

import torch
from by_hand import fit
from helpers import ToyModule, loader, resume, trainer

from fairbatch_lightning import FairBatch, SignedSteps


def test_resume_at_the_end_of_an_epoch(tmp_path):
    whole = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    uninterrupted = fit(whole, max_epochs=5)
    first = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    run = trainer(first, max_epochs=2)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "last.ckpt")
    torch.load(tmp_path / "last.ckpt", weights_only=True)
    second, module = FairBatch(groups="group", rule=SignedSteps(alpha=0.05)), ToyModule()
    resume(trainer(second, max_epochs=5), module, loader(), tmp_path / "last.ckpt")
    assert module.batches == uninterrupted.batches[24:]
    assert torch.equal(module.net.weight, uninterrupted.net.weight)
    assert torch.equal(second.shares, whole.shares)
    assert [r.epoch for r in second.history] == [0, 1, 2, 3, 4]


def test_checkpoints_with_and_without_the_callback(tmp_path):
    run = trainer(FairBatch(groups="group"), max_epochs=1)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "with.ckpt")
    resume(trainer(max_epochs=2), ToyModule(), loader(), tmp_path / "with.ckpt")
    run = trainer(max_epochs=1)
    run.fit(ToyModule(), loader())
    run.save_checkpoint(tmp_path / "without.ckpt")
    callback = FairBatch(groups="group", rule="paper")
    resume(trainer(callback, max_epochs=2), ToyModule(), loader(), tmp_path / "without.ckpt")
    assert [record.epoch for record in callback.history] == [1]
