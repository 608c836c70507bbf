"""What drawing fair batches costs: an epoch's batches of indices against torch's RandomSampler and BatchSampler.

    python examples/benchmarks/sampling.py --out benchmarks

Through the loader that the callback builds, and as a plain `sampler=`; how the cost per sample grows with the data; how
long it takes to start; and how much memory is held.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import interleaved, report, seconds
from torch.utils.data import BatchSampler, RandomSampler

from fairbatch_lightning import FairSampler, GroupIndex
from fairbatch_lightning.batches.delivery import FairBatchSampler


def labels_and_groups(number: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    random, side = np.random.default_rng(0), int(cells**0.5)
    return tuple(random.integers(side, size=number).astype(np.uint8) for _ in range(2))


def exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def deliver(batches: FairBatchSampler) -> None:
    """Draw an epoch as the callback's loader does, which keeps count of what is delivered."""
    for _ in batches.deliver(batches.__iter__):
        batches.take()


def epoch(number: int, cells: int, batch_size: int, rounds: int, plain: bool) -> dict[str, float]:
    """Compare an epoch's indices."""
    sampler = FairSampler(*labels_and_groups(number, cells), batch_size)
    ours, fair = BatchSampler(sampler, batch_size, True), FairBatchSampler(sampler)
    theirs = BatchSampler(RandomSampler(range(number)), batch_size, True)
    draw = (lambda: exhaust(ours)) if plain else (lambda: deliver(fair))
    return interleaved(lambda: seconds(draw), lambda: seconds(lambda: exhaust(theirs)), rounds)


def start(number: int, rounds: int) -> dict[str, float]:
    """Compare the time to the first batch, labels and groups given, with torch's one permutation."""
    labels, groups = labels_and_groups(number, 4)

    def ours() -> None:
        next(iter(FairBatchSampler(FairSampler(labels, groups, 128))))

    return interleaved(lambda: seconds(ours), lambda: seconds(lambda: torch.randperm(number)), rounds)


def memory(number: int) -> tuple[float, float]:
    """Return the held bytes per sample and the peak, after drawing some batches."""
    labels, groups = labels_and_groups(number, 4)
    before = _resident()
    sampler = FairSampler.from_index(GroupIndex.from_values(labels, groups), 128)
    batches = sampler.batches()
    exhaust(itertools.islice(batches, 1000))
    held = _resident() - before
    return held / number, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def in_a_process_of_its_own(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10**6, help="samples")
    parser.add_argument("--memory-number", type=int, default=10**8, help="samples for the measurement of memory")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for JSON")
    args = parser.parse_args()
    rows = []
    for plain, must in ((False, 0.6), (True, 1.2)):
        for cells in (4, 100):
            for size in args.batch_sizes:
                way = "as sampler=" if plain else "callback's loader"
                result = epoch(args.number, cells, size, args.rounds, plain)
                what = f"{way}, {args.number:.0e} samples, {cells} cells, batch {size}"
                rows.append({"what": what, **result, "must reach": must})
    for cells in (4, 100):
        per_sample = {}
        for number in (args.number // 10, args.number * 10):
            per_sample[number] = epoch(number, cells, 128, 3, plain=False)["ours"] / number
        small, large = per_sample.values()
        what = f"time per sample, {args.number * 10:.0e} against {args.number / 10:.0e} samples, {cells} cells"
        rows.append({"what": what, "ours": large, "theirs": small, "ratio": large / small, "must reach": 1.5})
    result = start(args.number, args.rounds)
    limit = f"randperm + 0.5 s = {result['theirs'] + 0.5:.2f} s"
    rows.append({"what": f"start with {args.number:.0e} samples", **result, "must reach": limit})
    held, peak = in_a_process_of_its_own(memory, args.memory_number)
    what = f"bytes held per sample, {args.memory_number:.0e} samples; peak of the process {peak / 2**30:.2f} GiB"
    rows.append({"what": what, "ours": held, "must reach": "16"})
    report("sampling", rows, args.out)


if __name__ == "__main__":
    main()
