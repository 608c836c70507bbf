"""What each of several processes gets when it talks to the others; saved, so that a test can look at it."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from fairbatch_lightning._support import processes
from fairbatch_lightning._support.warn import warn


def talk(folder, port, rank, number):
    """Join a process group, use everything that `_support.processes` has, and save what came of it."""
    before = processes.world_size(), processes.rank(), processes.has_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=number)
    own = torch.tensor([1.0, 10.0]) * (rank + 1)
    shared = [torch.full((2,), float(rank)), torch.tensor(rank + 5)]
    found = {
        "before": before,
        "now": (processes.world_size(), processes.rank(), processes.has_group()),
        "sum": processes.world_sum(own),
        "own": own,
        "gathered": processes.gathered({"rank": rank, "name": "ab"[rank]}),
    }
    processes.share_first(shared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("said once")
    torch.save({**found, "shared": shared, "warnings": len(caught)}, Path(folder) / f"talk{rank}.pt")
    dist.destroy_process_group()
