"""A training job for the distributed tests: run as a script, it saves what every process saw.

python distributed_job.py FOLDER '{"strategy": "ddp", ...}'
"""

import atexit
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from canonical import CALLBACKS
from helpers import Toy, ToyModule, loader, resume, trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, Subset

from fairbatch_lightning import FairnessMonitor


class Validated(ToyModule):
    """With a validation loop."""

    def validation_step(self, batch, batch_idx):
        self(batch[0])


class WithBatchNorm(ToyModule):
    """Its statistics differ between processes until someone makes them equal."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


class LittleMemory(WithBatchNorm):
    """The second process cannot evaluate more samples at once than it trains on."""

    def training_step(self, batch, batch_idx):
        if not self.training and self.global_rank == 1 and len(batch[0]) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch, batch_idx)


class Failing(ToyModule):
    """The first process fails in the middle of the second epoch; the other goes on and waits for it."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 0 and self.global_step == 20:
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)


class Relabelled(ToyModule):
    """The second process trains on other labels."""

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        return super().training_step((x, 1 - y if self.global_rank == 1 else y, index), batch_idx)


class Signalled(ToyModule):
    """Each process gets SLURM's signal to save a checkpoint, at a place of its own."""

    places = (18, "on_train_batch_end"), (19, "training_step")

    def reached(self, place):
        if (
            self.trainer.ckpt_path is None
            and (self.trainer.fit_loop.total_batch_idx, place) == self.places[self.global_rank]
        ):
            os.kill(os.getpid(), signal.SIGUSR1)

    def training_step(self, batch, batch_idx):
        self.reached("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.reached("on_train_batch_end")


class TensorParallel(ToyModule):
    """Its processes all hold the whole model, as if they were one."""

    def configure_model(self):
        pass


class Sharded(ToyModule):
    """Its weights are split over the processes (FSDP2)."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


MODULES = {
    "plain": ToyModule,
    "validated": Validated,
    "little memory": LittleMemory,
    "failing": Failing,
    "relabelled": Relabelled,
    "signalled": Signalled,
    "tensor parallel": TensorParallel,
    "batchnorm": WithBatchNorm,
    "sharded": Sharded,
}


def job(
    folder,
    strategy="auto",
    devices=1,
    batch_size=20,
    num_samples=241,
    num_workers=0,
    epochs=3,
    module="plain",
    method="online",
    settings=None,
    use_distributed_sampler=True,
    limit=1.0,
    ckpt_path=None,
    save=None,
    save_every=None,
    save_on_exception=False,
    drop_last=False,
    own_data=False,
    slurm=False,
    busy_end=False,
):
    torch.manual_seed(0)
    model = MODULES[module]()
    callback = None if method is None else CALLBACKS[method](**(settings or {}))
    monitor = FairnessMonitor(groups="group")
    if strategy == "model_parallel":
        from lightning.pytorch.strategies import ModelParallelStrategy

        copies = devices if module == "tensor parallel" else 1
        strategy = ModelParallelStrategy(data_parallel_size=devices // copies, tensor_parallel_size=copies)
    if slurm:
        rank, number = os.environ["RANK"], devices
        os.environ.update(
            SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NTASKS=f"{number}", SLURM_NTASKS_PER_NODE=f"{number}"
        )
        os.environ.update(SLURM_JOB_NAME="job", SLURM_JOB_ID="1", SLURM_NODEID="0")
    run = trainer(
        *([] if callback is None else [callback]),
        *([monitor] if module == "validated" else []),
        Keep(folder, callback, monitor),
        *([Ending(folder)] if busy_end else []),
        *([ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=save_every)] if save_every else []),
        *([OnExceptionCheckpoint(folder)] if save_on_exception else []),
        max_epochs=epochs,
        strategy=strategy,
        devices=devices,
        use_distributed_sampler=use_distributed_sampler,
        limit_train_batches=limit,
        plugins=[SLURMEnvironment()] if slurm else None,
        default_root_dir=folder,
        enable_checkpointing=save_every is not None or save_on_exception,
    )
    data = loader(Subset(Toy(300), range(num_samples)), batch_size, num_workers=num_workers, drop_last=drop_last)
    held_out = Subset(Toy(300), range(num_samples, num_samples + 51))
    if own_data:  # of every process: groups a and b, and b and c
        rank = int(os.environ.get("LOCAL_RANK", 0))
        wanted = ("ab", "bc")[rank] if devices > 1 else "abbc"
        held_out = Subset(Toy(300), [i for group in wanted for i in range(300) if Toy(300).group[i] == group])
    resume(run, model, data, ckpt_path, DataLoader(held_out, batch_size=batch_size))
    if save:
        run.save_checkpoint(Path(folder) / save)


class Ending(Callback):
    """Says at the very end of a process whether it is in a process group, and leaves work to a busy one's threads."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def on_fit_start(self, run, model):  # what is registered first is called last
        atexit.register(lambda: (self.folder / f"end{run.global_rank}").write_text(f"{dist.is_initialized()}"))

    def teardown(self, run, model, stage):
        atexit.register(self.be_busy)

    def be_busy(self):
        for _ in range(100):
            dist.all_reduce(torch.zeros(20_000), async_op=True)


class Keep(Callback):
    """Saves what each process saw; the processes of `ddp_spawn` cannot hand it over otherwise."""

    def __init__(self, folder, callback, monitor):
        self.folder, self.callback, self.monitor = Path(folder), callback, monitor

    def on_train_end(self, run, model):
        state = {
            "batches": model.batches,
            "history": [record.state_dict() for record in getattr(self.callback, "history", [])],
            "shares": getattr(self.callback, "shares", None),
            "fairness": self.monitor.state_dict(),
            "confusion": {stage: audit.confusion for stage, audit in self.monitor.audits.items()},
            "weights": {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
                for name, value in model.state_dict().items()
            },
        }
        torch.save(state, self.folder / f"rank{run.global_rank}.pt")


if __name__ == "__main__":
    job(sys.argv[1], **json.loads(sys.argv[2]))
    if dist.is_initialized():  # gloo's threads must not outlive Python
        dist.destroy_process_group()
