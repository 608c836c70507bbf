"""The train DataLoader is found in whatever Lightning takes; what cannot be made fair is refused in plain words."""

import warnings

import pytest
import torch
from helpers import Toy, loader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fairbatch_lightning import FairBatchWarning
from fairbatch_lightning.batches.train_loader import TrainLoader, is_ordinary


class Stream(IterableDataset):
    def __iter__(self):
        yield from Toy()


class OwnBatches:
    """Batches of 20 of all samples."""

    def __init__(self):
        self.sampler = range(240)

    def __iter__(self):
        yield from (list(range(i, i + 20)) for i in range(0, 240, 20))

    def __len__(self):
        return 12


class SomeBatches:
    """Three batches of 20, of samples that its author chose."""

    batch_size = 20

    def __iter__(self):
        yield from (list(range(i, i + 20)) for i in range(0, 60, 20))

    def __len__(self):
        return 3


class Batches:
    def __iter__(self):
        yield from loader()


@pytest.mark.parametrize(
    ("given", "name", "message"),
    [
        (lambda: DataLoader(Stream(), 20), None, "cannot choose the samples of Stream: .* Use a map-style dataset"),
        (
            lambda: [loader(), loader()],
            None,
            r"got 2. Name it, FairBatch\(loader=0\), or join the datasets with .*ConcatDataset",
        ),
        (lambda: {"a": loader(), "b": loader()}, None, "Name it, FairBatch.loader='a'."),
        (lambda: [loader(), loader()], 2, r"`loader` to be one of \[0, 1\] but got 2"),
        (lambda: {"a": loader(), "b": loader()}, "c", r"`loader` to be one of \['a', 'b'\] but got 'c'"),
        (lambda: DataLoader(Toy(), batch_size=None), None, "has batch_size=None.* give the DataLoader a batch_size"),
        (
            lambda: DataLoader(Toy(), batch_sampler=OwnBatches()),
            None,
            "OwnBatches but cannot tell its batch size",
        ),
        (
            lambda: DataLoader(Toy(), batch_sampler=SomeBatches()),
            None,
            "240 samples, but your SomeBatches draws 60",
        ),
        (lambda: {"a": [loader(), loader()], "b": loader()}, "b", "but got containers inside of it"),
        (lambda: Batches(), None, "FairBatch needs a torch.utils.data.DataLoader for training but got Batches"),
        (
            lambda: DataLoader(Toy(), 20, sampler=SubsetRandomSampler(range(100))),
            None,
            r"all 240 samples, but your SubsetRandomSampler draws 100. If it leaves some out, use .*Subset\(dataset",
        ),
    ],
)
def test_what_cannot_be_made_fair_is_refused(given, name, message):
    with pytest.raises((ValueError, TypeError), match=message):
        TrainLoader.find(given(), name)


def test_messages_name_who_asks():
    with pytest.raises(ValueError, match=r"Cutting acts on one train DataLoader but got 2. Name it, Cutting\(loader=0"):
        TrainLoader.find([loader(), loader()], who="Cutting")


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda own, other: own, None),
        (lambda own, other: [own], None),
        (lambda own, other: [other, own], 1),
        (lambda own, other: {"a": other, "b": own}, "b"),
        (lambda own, other: CombinedLoader({"a": other, "b": own}, "min_size"), "b"),
        (lambda own, other: CombinedLoader([own, other], "max_size_cycle"), 0),
    ],
    ids=["alone", "list of one", "list", "dict", "combined dict", "combined list"],
)
def test_the_loader_is_found_and_put_back_where_it_was(wrap, name):
    own, other, new = loader(), loader(), loader()
    given = wrap(own, other)
    found = TrainLoader.find(given, name)
    assert found.loader is own
    back = found.put_back(new)
    assert TrainLoader.find(back, name).loader is new
    assert type(back) is type(wrap(new, other))
    if isinstance(given, CombinedLoader):
        assert back._mode == given._mode
    assert TrainLoader.find(given, name).loader is own  # what the user gave is as it was


def test_a_batch_is_wrapped_as_training_step_gets_it():
    small = loader(Toy(30), batch_size=7)
    found = TrainLoader.find({"a": small, "b": loader()}, "b")
    state = torch.get_rng_state()
    wrapped = found.wrap("a batch")
    assert wrapped["b"] == "a batch"
    assert wrapped["a"][2].tolist() == list(range(7))  # the first samples, not the next ones
    assert torch.equal(torch.get_rng_state(), state)
    assert found.has_others
    alone = TrainLoader.find(small)
    assert alone.wrap("a batch") == "a batch"
    assert not alone.has_others


@pytest.mark.parametrize(
    ("new", "sizes"),
    [
        (lambda: loader(batch_size=50), (50, False, 240)),
        (lambda: loader(batch_size=50, drop_last=True), (50, True, 240)),
        (lambda: DataLoader(Toy(), 20, sampler=RandomSampler(Toy(), num_samples=60)), (20, False, 60)),
        (lambda: DataLoader(Toy(), 20, sampler=DistributedSampler(Toy(), 7, 0)), (20, False, 245)),
    ],
    ids=["plain", "drop last", "shorter epochs", "distributed"],
)
def test_ordinary_loaders_are_taken_without_a_word(new, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = TrainLoader.find(new())
    assert (found.batch_size, found.drop_last, found.epoch_size) == sizes


def test_another_way_of_sampling_is_replaced_and_said_so():
    weighted = DataLoader(Toy(), 20, sampler=WeightedRandomSampler(torch.ones(240), 100))
    with pytest.warns(FairBatchWarning, match="FairBatch replaces your WeightedRandomSampler: it decides itself"):
        assert TrainLoader.find(weighted).epoch_size == 100


def test_a_batch_sampler_with_a_batch_size_is_replaced_and_said_so():
    own = OwnBatches()
    own.batch_size, own.drop_last = 20, True
    with pytest.warns(FairBatchWarning, match="replaces your OwnBatches"):
        found = TrainLoader.find(DataLoader(Toy(), batch_sampler=own))
    assert (found.batch_size, found.drop_last, found.epoch_size) == (20, True, 240)


def test_an_incomplete_batch_that_is_dropped_is_not_left_out():
    shuffled = DataLoader(Toy(), 50, sampler=SubsetRandomSampler(range(240)), drop_last=True)
    with pytest.warns(FairBatchWarning, match="replaces your SubsetRandomSampler"):
        TrainLoader.find(shuffled)


def test_which_samplers_a_loader_makes_by_itself():
    assert all(is_ordinary(one) for one in (loader().sampler, loader().batch_sampler, DataLoader(Toy()).sampler))
    mine = type("RandomSampler", (RandomSampler,), {"__module__": "mine"})(Toy())
    assert not any(is_ordinary(one) for one in (mine, SubsetRandomSampler([0]), DistributedSampler(Toy(), 1, 0), None))


def test_a_loader_is_found_as_a_file_or_a_command_line_has_it():
    """Where "1" may have become 1, or the other way round."""
    own = loader()
    assert TrainLoader.find({"0": loader(), "1": own}, 1).loader is own
    assert TrainLoader.find([loader(), own], "1").loader is own
