"""Other batches in a user's DataLoader, and a true account of which of them were delivered."""

import time

import pytest
import torch
from cell_data import SIZES, data
from torch.utils.data import DataLoader, TensorDataset

from fairbatch_lightning import FairSampler
from fairbatch_lightning.batches.delivery import FairBatchSampler, stop_workers, with_batches

LABELS, GROUPS = data(SIZES["binary"])


def fair_batches(batch_size=100, **settings):
    return FairBatchSampler(FairSampler(LABELS, GROUPS, batch_size, **settings))


def fair_loader(batch_sampler, **settings):
    return with_batches(DataLoader(TensorDataset(torch.arange(500)), batch_size=25, **settings), batch_sampler)


def taken(batch_sampler):
    found = []
    while (batch := batch_sampler.take()) is not None:
        found.append(batch.samples)
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
class TestAccount:
    def test_what_was_delivered_is_known_in_order(self, num_workers):
        batch_sampler = fair_batches()
        seen = [batch.tolist() for (batch,) in fair_loader(batch_sampler, num_workers=num_workers)]
        assert seen == list(FairSampler(LABELS, GROUPS, 100).batches())
        assert taken(batch_sampler) == seen

    def test_what_was_only_fetched_in_advance_is_not(self, num_workers):
        batch_sampler = fair_batches(10)
        stream = iter(fair_loader(batch_sampler, num_workers=num_workers))
        seen = [next(stream)[0].tolist() for _ in range(3)]
        assert taken(batch_sampler) == seen

    def test_a_batch_comes_with_its_cells(self, num_workers):
        batch_sampler = fair_batches()
        (batch,) = next(iter(fair_loader(batch_sampler, num_workers=num_workers)))
        assert batch_sampler.delivered().cells.tolist() == (LABELS * 2 + GROUPS)[batch].tolist()
        assert batch_sampler.take().samples == batch.tolist()
        assert batch_sampler.delivered() is None

    def test_a_look_at_the_loader_while_it_is_trained_on_does_not_count(self, num_workers):
        batch_sampler = fair_batches()
        loader = fair_loader(batch_sampler, num_workers=num_workers)
        training = iter(loader)
        seen = [next(training)[0].tolist()]
        assert len(list(loader)) == 5
        seen += [batch.tolist() for (batch,) in training]
        assert taken(batch_sampler) == seen
        assert len(seen) == 5

    def test_after_a_pass_that_was_given_up_the_next_one_counts(self, num_workers):
        batch_sampler = fair_batches()
        loader = fair_loader(batch_sampler, num_workers=num_workers)
        given_up = iter(loader)
        next(given_up)
        batch_sampler.forget()
        assert batch_sampler.delivered() is None
        seen = [batch.tolist() for (batch,) in loader]
        assert taken(batch_sampler) == seen
        given_up.close()


def test_a_batch_sampler_has_the_length_and_sizes_of_its_sampler():
    batch_sampler = fair_batches(60, drop_last=False)
    assert len(batch_sampler) == len(list(batch_sampler)) == 9
    assert (batch_sampler.batch_size, batch_sampler.drop_last) == (60, False)


class Special(DataLoader):
    """Someone's subclass, with arguments of its own."""

    def __init__(self, *args, colour, **kwargs):
        super().__init__(*args, **kwargs)
        self.colour = colour


def test_a_subclass_and_all_its_arguments_survive():
    original = Special(TensorDataset(torch.arange(500)), 25, colour="red", collate_fn=len, timeout=3, num_workers=1)
    loader = with_batches(original, fair_batches(), pin_memory=False)
    assert isinstance(loader, Special)
    assert type(loader).__name__ == "Special"
    assert (loader.colour, loader.collate_fn, loader.timeout) == ("red", len, 3)
    assert (loader.batch_size, len(loader)) == (100, 5)
    assert (original.batch_size, len(original)) == (25, 20)
    assert type(original) is Special


def test_the_dataset_can_be_another():
    other = TensorDataset(-torch.arange(500))
    loader = with_batches(DataLoader(TensorDataset(torch.arange(500)), 25), fair_batches(), dataset=other)
    assert all(batch.max() <= 0 for (batch,) in loader)


def test_batches_come_in_order_whatever_the_loader_was_told():
    original = DataLoader(TensorDataset(torch.arange(500)), 25)
    if not hasattr(original, "in_order"):
        pytest.skip("this version of torch always delivers in order")
    original.in_order = False
    assert with_batches(original, fair_batches()).in_order
    assert not original.in_order


def test_nothing_is_drawn_before_the_first_batch_is_needed():
    """Lightning calls iter() before it says which epoch it is."""
    batch_sampler = fair_batches()
    stream = iter(fair_loader(batch_sampler))
    assert not batch_sampler.sampler.started
    batch_sampler.sampler.set_epoch(3)
    (batch,) = next(stream)
    assert (batch_sampler.sampler.started, batch_sampler.sampler.epoch) == (True, 3)
    other = FairSampler(LABELS, GROUPS, 100)
    other.set_epoch(3)
    assert batch.tolist() == next(other.batches())


def test_workers_that_a_loader_keeps_are_ended():
    loader = fair_loader(fair_batches(), num_workers=2, persistent_workers=True)
    next(iter(loader))
    workers = loader._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    start = time.monotonic()
    stop_workers(loader)
    assert time.monotonic() - start < 5
    assert not any(worker.is_alive() for worker in workers)
    assert loader._iterator is None


def test_a_loader_without_workers_needs_no_end():
    loader = fair_loader(fair_batches())
    next(iter(loader))
    stop_workers(loader)
    assert len(list(loader)) == 5
