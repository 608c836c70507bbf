"""What is promised of baselines in whole runs, beyond what is promised of every callback."""

import pytest
import torch
from baseline_methods import CHANGE_LOSS
from canonical import CALLBACKS
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, RandomSampler

from fairbatch_lightning.callbacks.baselines import Reweighing

BASELINES = ["cutting", "boosting", "reweighing", "resampling", "group dro", "worst case", "constraints", "adversary"]


@pytest.mark.slow
@pytest.mark.parametrize("method", BASELINES)
def test_resumes_with_another_number_of_workers(method, tmp_path):
    """In the middle of an epoch, of which worker processes had fetched more than was trained on."""
    new, options = CALLBACKS[method], {"max_epochs": 3}
    whole, first, second = ToyModule(), ToyModule(), ToyModule()
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    trainer(new(), **options).fit(whole, loader(batch_size=10))
    trainer(new(), keep, **options, enable_checkpointing=True).fit(first, loader(batch_size=10, num_workers=2))
    resume(trainer(new(), **options), second, loader(batch_size=10), tmp_path / "step=8.ckpt")
    assert first.batches == whole.batches
    assert second.batches == whole.batches[8:]
    assert torch.equal(second.net.weight, whole.net.weight)


@pytest.mark.slow
@pytest.mark.parametrize("new", CHANGE_LOSS.values(), ids=CHANGE_LOSS)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_precision(new, precision):
    """The weights change, and are numbers of the precision that was asked for."""
    module, plain = ToyModule(), ToyModule()
    run = trainer(new(), precision=precision, max_epochs=1)
    run.fit(module, loader())
    assert run.global_step == 12
    expected = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}[precision]
    assert module.net.weight.dtype == expected
    assert module.net.weight.isfinite().all()
    assert not torch.allclose(module.net.weight.float(), plain.net.weight, atol=1e-2)


def test_epochs_have_the_length_of_the_users_sampler():
    sampler = RandomSampler(range(240), replacement=True, num_samples=1000)
    run = trainer(Reweighing(groups="group"), max_epochs=1)
    run.fit(ToyModule(), DataLoader(Toy(), batch_size=20, sampler=sampler))
    assert run.global_step == 50
