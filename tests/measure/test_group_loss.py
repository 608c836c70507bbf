"""GroupLoss against brute force, and in two real processes."""

import pickle

import pytest
import torch
import torch.multiprocessing as mp

from fairbatch_lightning import GroupLoss


def samples(num=1000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels, groups = torch.randint(3, (num,), generator=generator), torch.randint(4, (num,), generator=generator)
    keep = (labels != 1) | (groups != 2)
    return torch.rand(num, generator=generator)[keep], labels[keep], groups[keep]


def brute_force(losses, labels, groups):
    return torch.stack(
        [torch.stack([losses[(labels == y) & (groups == z)].double().mean() for z in range(4)]) for y in range(3)]
    )


def test_means_of_the_cells_over_batches():
    losses, labels, groups = samples()
    metric = GroupLoss(3, 4)
    for part in range(0, len(losses), 64):
        metric.update(losses[part : part + 64], labels[part : part + 64], groups[part : part + 64])
    torch.testing.assert_close(metric.compute(), brute_force(losses, labels, groups), equal_nan=True)
    assert metric.compute()[1, 2].isnan()
    assert metric.counts.sum() == len(losses)
    assert metric.counts[1, 2] == 0


def test_sums_do_not_lose_small_losses():
    """In float32 the sum would stop growing at 2**24."""
    metric = GroupLoss(1, 1)
    zeros = torch.zeros(1, dtype=torch.long)
    metric.update(torch.tensor([2.0**25]), zeros, zeros)
    for _ in range(100):
        metric.update(torch.ones(1), zeros, zeros)
    assert metric.sums.item() == 2**25 + 100


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_loss_stays_in_its_cell(broken):
    metric = GroupLoss(2, 2)
    metric.update(torch.tensor([broken, 1.0, 2.0]), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    assert metric.compute().isfinite().tolist() == [[False, True], [False, True]]


def test_losses_of_any_precision_and_with_gradients():
    zeros = torch.zeros(2, dtype=torch.long)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        metric = GroupLoss(1, 1)
        metric.update(torch.tensor([0.5, 1.5], dtype=dtype, requires_grad=True), zeros, zeros)
        assert metric.compute().item() == 1.0
        assert not metric.sums.requires_grad


def test_state_lives_where_the_metric_is_moved():
    metric = GroupLoss(2, 2).to("meta")
    zeros = torch.zeros(3, dtype=torch.long, device="meta")
    metric.update(torch.zeros(3, device="meta"), zeros, zeros)
    assert {metric.sums.device.type, metric.counts.device.type, metric.compute().device.type} == {"meta"}


def test_survives_pickle_and_reset():
    metric = pickle.loads(pickle.dumps(GroupLoss(1, 2)))
    metric.update(torch.ones(2), torch.zeros(2, dtype=torch.long), torch.tensor([0, 1]))
    metric.reset()
    assert metric.counts.sum() == 0


@pytest.mark.parametrize(
    "shapes", [((3,), (3,), (2,)), ((3, 1), (3,), (3,)), ((), (), ())], ids=["length", "dimensions", "scalars"]
)
def test_wrong_shapes_are_refused(shapes):
    losses, labels, groups = shapes
    with pytest.raises(ValueError, match="vectors of the same length but got shapes"):
        GroupLoss(2, 2).update(torch.zeros(losses), torch.zeros(labels).long(), torch.zeros(groups).long())


def test_cells_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="`groups` to be numbers from 0 to 2 but got some from 0 to 3"):
        GroupLoss(2, 3).update(torch.zeros(2), torch.tensor([0, 1]), torch.tensor([0, 3]))


def _in_process(rank, port, results):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    losses, labels, groups = samples()
    part = slice(0, 100) if rank == 0 else slice(100, None)  # unequal parts: each sample must count the same
    metric = GroupLoss(3, 4)
    metric.update(losses[part], labels[part], groups[part])
    results[rank] = metric.compute(), metric.counts
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_exact(free_port):
    results = mp.get_context("spawn").Manager().dict()
    context = mp.spawn(_in_process, (free_port, results), nprocs=2, join=False)
    deadline = 60
    while not context.join(timeout=1):
        deadline -= 1
        assert deadline > 0, "the processes hang"
    for rank in range(2):
        losses, own = results[rank]
        torch.testing.assert_close(losses, brute_force(*samples()), equal_nan=True)
        assert own.sum() == (100 if rank == 0 else len(samples()[0]) - 100)
