"""Which samples the batches of a validation or test DataLoader hold, without a look into them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Toy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler, Subset

from fairbatch_lightning.batches.held_out import check_held_out, num_replicas, samples_of_batches


def held_out(**settings):
    return DataLoader(Toy(50), **{"batch_size": 8, **settings})


def validating(loaders):
    """Return what is asked of a Trainer that goes through these loaders."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    return SimpleNamespace(_evaluation_loop=SimpleNamespace(_combined_loader=combined))


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_hold_what_the_loader_delivers(drop_last):
    loader = held_out(drop_last=drop_last)
    told = [samples.tolist() for samples in samples_of_batches(loader)]
    assert told == [index.tolist() for _, _, index in loader]
    assert num_replicas(loader) == 1


@pytest.mark.parametrize("number", [2, 3, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_of_several_processes_every_sample_counts_once(number, drop_last):
    """torch's sampler repeats the first samples so that all processes have as many."""
    seen = []
    for rank in range(number):
        loader = held_out(sampler=DistributedSampler(Toy(50), number, rank, shuffle=False, drop_last=drop_last))
        assert num_replicas(loader) == number
        for samples, (_, _, index) in zip(samples_of_batches(loader), loader, strict=True):
            counted = samples >= 0
            assert np.array_equal(samples[counted], index[torch.from_numpy(counted)])
            seen += samples[counted].tolist()
    assert sorted(seen) == list(range(50 // number * number if drop_last else 50))


class Stream(IterableDataset):
    def __iter__(self):
        yield from Toy()


@pytest.mark.parametrize(
    "loader",
    [
        held_out(),
        held_out(num_workers=1),
        held_out(drop_last=True),
        held_out(sampler=DistributedSampler(Toy(50), 2, 0, shuffle=False)),
        DataLoader(Toy(50), batch_sampler=BatchSampler(SequentialSampler(Toy(50)), 8, drop_last=False)),
    ],
    ids=["plain", "worker", "drop last", "distributed", "batch sampler"],
)
def test_what_comes_in_order_is_taken(loader):
    check_held_out(validating([loader]), [loader], "FairnessMonitor")


@pytest.mark.parametrize(
    ("loader", "error", "message"),
    [
        (held_out(shuffle=True), ValueError, "Somebody has to know .* the DataLoader shuffles.*Use shuffle=False"),
        (held_out(sampler=[3, 1, 2]), ValueError, "has a sampler of its own"),
        (held_out(sampler=DistributedSampler(Toy(50), 2, 0)), ValueError, "the DataLoader shuffles"),
        (DataLoader(Toy(50), batch_sampler=[[0, 1], [2]]), ValueError, r"torch.utils.data.Subset to leave samples out"),
        (
            held_out(batch_size=None),
            TypeError,
            "use a .*DataLoader with a batch_size and a map-style dataset. It got",
        ),
        (DataLoader(Stream(), 8), TypeError, "It got DataLoader of Stream"),
        ([torch.zeros(3)], TypeError, "It got list of NoneType"),
    ],
)
def test_what_comes_in_an_unknown_order_is_refused(loader, error, message):
    with pytest.raises(error, match=message):
        check_held_out(validating([loader]), [loader], "Somebody")


def test_samples_that_are_delivered_as_they_are_ready_are_refused():
    loader = held_out(num_workers=1)
    loader.in_order = False
    with pytest.raises(ValueError, match="in_order=False"):
        check_held_out(validating([loader]), [loader], "Somebody")


def test_loaders_that_do_not_come_one_after_the_other_are_refused():
    loaders = [held_out(), DataLoader(Subset(Toy(50), range(9)), 8)]
    check_held_out(validating(loaders), loaders, "Somebody")
    with pytest.raises(ValueError, match="one after the other, but got a CombinedLoader with mode='max_size'"):
        check_held_out(validating(CombinedLoader(loaders, "max_size")), loaders, "Somebody")


def test_loaders_that_do_not_matter_may_shuffle():
    first, second = held_out(), held_out(shuffle=True)
    check_held_out(validating([first, second]), [first], "Somebody")
