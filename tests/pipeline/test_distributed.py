"""Two real processes (gloo on the CPU) do exactly what one does."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import processes
import pytest
import torch
from canonical import CALLBACKS
from distributed_job import WithBatchNorm, job
from helpers import Toy

from fairbatch_lightning import FairBatchWarning

pytestmark = pytest.mark.slow
PER_PROCESS = ["constraints"]  # its covariances are those of each process's own part of a batch
SCRIPT = Path(__file__).parents[1] / "distributed_job.py"


def start(folder, port, limit=120, until=None, **arguments):
    """Run the job in processes of its own, as torchrun does, with a hard time limit; return exit codes and errors.

    When the file `until` has been there for a second, they are killed.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.glob("rank*.pt"):
        old.unlink()
    number = arguments["devices"]
    place = {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
    place.update(GROUP_RANK=0, WORLD_SIZE=number, LOCAL_WORLD_SIZE=number)
    workers = [
        processes.start(
            partial(job, folder, **arguments),
            output=folder / f"rank{rank}",
            limit=limit,
            **place,
            RANK=rank,
            LOCAL_RANK=rank,
        )
        for rank in range(number)
    ]
    while until is not None and any(worker.is_alive() for worker in workers):
        if until.exists() and time.time() - until.stat().st_mtime > 1:
            for worker in workers:
                worker.kill()
            break
        time.sleep(0.1)
    for worker in workers:
        worker.join()
    errors = "".join((folder / f"rank{rank}.err").read_text() for rank in range(number))
    return [worker.exitcode for worker in workers], errors


def start_by_lightning(folder, port, **arguments):
    """Start one process and leave it to Lightning to start the other one."""
    folder.mkdir(exist_ok=True)
    command = ["timeout", "-s", "KILL", "120", sys.executable, str(SCRIPT), str(folder), json.dumps(arguments)]
    environment = {**os.environ, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return [done.returncode], done.stderr


def run_alone(folder, **arguments):
    """Run the job in this process."""
    folder.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        job(folder, **arguments)
    finally:
        torch.set_num_threads(threads)
    return torch.load(folder / "rank0.pt", weights_only=True)


def run(folder, port, launcher=start, **arguments):
    """Run the job in several processes; return what each of them saw."""
    codes, errors = launcher(folder, port, **arguments)
    assert not any(codes), errors[-3000:]
    ranks = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank*.pt"))]
    assert len(ranks) == arguments["devices"]
    return ranks


def assert_equal_history(one, other, exact=True):
    assert len(one["history"]) == len(other["history"]) > 0
    for record, expected in zip(one["history"], other["history"], strict=True):
        for name, value in record.items():
            if name in ("epoch", "step", "unit"):
                assert value == expected[name]
            else:
                within = 0 if exact else 1e-5
                torch.testing.assert_close(value, expected[name], atol=within, rtol=within, equal_nan=True)


def joined(ranks):
    """Return the global batches: rank 0 has the first, third, ... sample of each."""
    assert len({len(rank["batches"]) for rank in ranks}) == 1
    parts = zip(*(rank["batches"] for rank in ranks), strict=True)
    return [[sample for pair in zip(*batches, strict=True) for sample in pair] for batches in parts]


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp", "launcher": start_by_lightning},
        {"strategy": "ddp_spawn", "launcher": start_by_lightning},
        {"strategy": "ddp", "use_distributed_sampler": False},
        {"strategy": "ddp", "num_workers": 2, "num_samples": 240, "drop_last": True},
        {"strategy": "ddp", "settings": {"update_every": 3}},
        {"strategy": "ddp", "settings": {"estimate": "validation"}, "module": "validated"},
        *({"strategy": "ddp", "method": method, "epochs": 2} for method in CALLBACKS if method not in PER_PROCESS),
    ],
    ids=lambda options: "-".join(str(getattr(value, "__name__", value)) for value in options.values()),
)
def test_two_processes_are_one_with_twice_the_batch(options, tmp_path, free_port):
    ranks = run(tmp_path / "two", free_port, devices=2, batch_size=10, **options)
    alone = {
        key: value for key, value in options.items() if key not in ("strategy", "launcher", "use_distributed_sampler")
    }
    one = run_alone(tmp_path / "one", batch_size=20, **alone)
    assert joined(ranks) == one["batches"]
    torch.testing.assert_close(ranks[0]["weights"], one["weights"], atol=1e-5, rtol=1e-5)
    if one["shares"] is not None:  # of the callbacks that change them
        assert_equal_history(ranks[0], ranks[1])
        assert torch.equal(ranks[0]["shares"], ranks[1]["shares"])
        assert_equal_history(ranks[0], one, exact=False)
        torch.testing.assert_close(ranks[0]["shares"], one["shares"])


@pytest.mark.parametrize(
    "options",
    [{"method": "online"}, {"method": None, "module": "validated"}],
    ids=["FairBatch", "the monitor"],
)
def test_spawned_processes_leave_their_group(options, tmp_path, free_port):
    """Whichever callback is there, and before Python ends: gloo's threads do not survive that."""
    options = {"strategy": "ddp_spawn", "devices": 2, "batch_size": 10, "epochs": 1, "busy_end": True, **options}
    run(tmp_path, free_port, launcher=start_by_lightning, **options)
    assert [(tmp_path / f"end{rank}").read_text() for rank in range(2)] == ["False", "False"]


def test_a_spawned_process_that_fails_waits_for_nobody(tmp_path, free_port):
    """It ends as it would without the callback: leaving the group could take forever."""
    options = {"strategy": "ddp_spawn", "devices": 2, "batch_size": 10, "module": "failing", "busy_end": True}
    codes, errors = start_by_lightning(tmp_path, free_port, **options)
    assert codes == [1], errors[-3000:]
    assert (tmp_path / "end0").read_text() == "True"


@pytest.mark.parametrize(("num_samples", "drop_last"), [(237, False), (239, True)])
def test_epoch_is_as_long_as_lightnings_own(num_samples, drop_last, tmp_path, free_port):
    options = {"strategy": "ddp", "devices": 2, "batch_size": 10, "num_samples": num_samples, "drop_last": drop_last}
    fair = run(tmp_path, free_port, epochs=1, **options)
    plain = run(tmp_path, free_port, epochs=1, method=None, **options)
    assert [len(rank["batches"]) for rank in fair] == [len(rank["batches"]) for rank in plain]


def test_evaluation_uses_one_set_of_batchnorm_statistics(tmp_path, free_port):
    """All processes measure the model of rank 0, count every sample once, and keep their own statistics."""
    options = {"strategy": "ddp", "devices": 2, "batch_size": 10, "module": "batchnorm", "epochs": 1}
    ranks = run(tmp_path, free_port, method="exact", **options)
    assert_equal_history(ranks[0], ranks[1])
    means = [rank["weights"]["net.1.running_mean"] for rank in ranks]
    assert not torch.equal(*means)
    model = WithBatchNorm()
    model.load_state_dict(ranks[0]["weights"])
    dataset = Toy(300)
    x, y, z = dataset.x[:241], dataset.targets[:241], dataset.group_ids[:241]
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model.eval()(x), y, reduction="none").double()
    cells = torch.stack([torch.stack([losses[(y == a) & (z == b)].mean() for b in range(3)]) for a in range(2)])
    torch.testing.assert_close(ranks[0]["history"][0]["losses"], cells, atol=1e-6, rtol=1e-6)


def test_resume_is_exact_and_with_another_number_of_processes_says_what_it_does(tmp_path, free_port):
    options = {"strategy": "ddp", "devices": 2, "batch_size": 10, "module": "batchnorm", "epochs": 3}
    whole = run(tmp_path / "whole", free_port, save_every=8, **options)
    path = str(tmp_path / "whole" / "step=16.ckpt")  # the fourth batch of the second epoch
    resumed = run(tmp_path / "resumed", free_port, ckpt_path=path, **options)
    for rank, expected in zip(resumed, whole, strict=True):
        assert rank["batches"] == expected["batches"][16:]
        assert_equal_history(rank, expected)
        for name, value in rank["weights"].items():
            assert torch.equal(value, expected["weights"][name]), name
    said = "middle of epoch 1, which had 13 batches of 20 samples and now has 25 of 10"
    with pytest.warns(FairBatchWarning, match=said):
        alone = run_alone(tmp_path / "alone", ckpt_path=path, batch_size=10, module="batchnorm", epochs=3)
    assert [record["epoch"] for record in alone["history"]] == [0, 1, 2]
    assert torch.equal(alone["history"][1]["shares_before"], whole[0]["history"][0]["shares_after"])


def test_fsdp2_trains_and_resumes(tmp_path, free_port):
    options = {"strategy": "model_parallel", "devices": 2, "batch_size": 10, "module": "sharded"}
    whole = run(tmp_path / "whole", free_port, epochs=4, **options)
    assert_equal_history(whole[0], whole[1])
    run(tmp_path / "first", free_port, epochs=2, save="last.ckpt", **options)
    path = str(tmp_path / "first" / "last.ckpt")
    resumed = run(tmp_path / "second", free_port, epochs=4, ckpt_path=path, **options)
    for rank, expected in zip(resumed, whole, strict=True):
        assert rank["batches"] == expected["batches"][len(expected["batches"]) // 2 :]
        assert_equal_history(rank, expected)
        torch.testing.assert_close(rank["weights"], expected["weights"])


def test_memory_that_runs_out_on_one_process(tmp_path, free_port):
    """That one evaluates smaller batches; the other does not wait for it in vain."""
    options = {"strategy": "ddp", "devices": 2, "batch_size": 10, "method": "exact", "epochs": 2}
    ranks = run(tmp_path / "little", free_port, module="little memory", **options)
    expected = run(tmp_path / "enough", free_port, module="batchnorm", **options)
    assert_equal_history(ranks[0], ranks[1])
    assert_equal_history(ranks[0], expected[0], exact=False)


def test_checkpoint_of_a_failure_on_one_process(tmp_path, free_port):
    """It is written at once, although the other process never gets to it, for which Lightning waits afterwards."""
    options = {"strategy": "ddp", "devices": 2, "batch_size": 10, "module": "failing", "save_on_exception": True}
    options["method"] = "importance"
    start(tmp_path, free_port, limit=60, until=tmp_path / "on_exception.ckpt", **options)
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    state = next(value for name, value in checkpoint["callbacks"].items() if "FairBatch" in name)
    assert checkpoint["global_step"] == 20
    assert state["learnt"]["estimate"]["counts"].shape == (1, 2, 3)


def test_wrong_labels_on_one_process_end_them_all(tmp_path, free_port):
    codes, errors = start(tmp_path, free_port, strategy="ddp", devices=2, batch_size=10, module="relabelled")
    assert codes == [1, 1]
    assert "WrongLabelsError: FairBatch has paired a batch with the wrong labels" in errors
    assert "Another process says: FairBatch has paired a batch with the wrong labels" in errors


@pytest.mark.parametrize(("method", "partial"), [("importance", True), ("the bare line", False)])
def test_checkpoint_of_a_signal(method, partial, tmp_path, free_port):
    """SLURM's signal reaches the processes at different places; the one that writes must not wait for the other."""
    options = {"strategy": "ddp", "devices": 2, "batch_size": 10, "module": "signalled", "method": method}
    path = tmp_path / "first" / "hpc_ckpt_1.ckpt"
    start(tmp_path / "first", free_port, limit=60, until=path, slurm=True, **options)
    state = torch.load(path, weights_only=True)
    assert state["global_step"] == 19
    resumed = run(tmp_path / "second", free_port, ckpt_path=str(path), **options)
    whole = run(tmp_path / "whole", free_port, **{**options, "module": "plain"})
    said = "Not all that was seen since the last update" in (tmp_path / "second" / "rank0.err").read_text()
    assert said == partial
    for rank, expected in zip(resumed, whole, strict=True):
        known = [record for record in rank["history"] if record["step"] <= 19]
        assert_equal_history({"history": known}, {"history": expected["history"][: len(known)]})
        assert len(rank["batches"]) == len(expected["batches"][19:])
        assert_equal_history(rank, resumed[0])
        if not partial:  # all was known, or nothing since an update just before
            assert_equal_history(rank, expected)
            assert rank["batches"] == expected["batches"][19:]


def test_tensor_parallel_processes_count_once(tmp_path, free_port):
    """Both train on the same samples, and their checkpoints can be resumed."""
    options = {"strategy": "model_parallel", "devices": 2, "batch_size": 20, "module": "tensor parallel"}
    whole = run(tmp_path, free_port, save_every=8, **options)
    assert whole[0]["batches"] == whole[1]["batches"]
    alone = run_alone(tmp_path / "alone", batch_size=20)
    assert alone["batches"] == whole[0]["batches"]
    assert_equal_history(whole[0], alone, exact=False)


@pytest.mark.parametrize("use_distributed_sampler", [True, False], ids=["shared", "each sees all"])
def test_monitor_counts_every_sample_once(use_distributed_sampler, tmp_path, free_port):
    """51 validation samples: with two processes one of them is repeated; without a sampler all are."""
    options = {"module": "validated", "epochs": 2}
    ranks = run(
        tmp_path / "two",
        free_port,
        strategy="ddp",
        devices=2,
        batch_size=10,
        use_distributed_sampler=use_distributed_sampler,
        **options,
    )
    one = run_alone(tmp_path / "one", batch_size=20, **options)
    assert one["confusion"]["val"].sum() == 51
    for rank in ranks:
        assert torch.equal(rank["confusion"]["val"], one["confusion"]["val"])
        assert rank["fairness"] == one["fairness"]
    assert len(one["fairness"]["history"]) == 2


def test_monitor_where_processes_have_data_of_their_own(tmp_path, free_port):
    """With other groups each: they must not be taken for one another."""
    options = {"module": "validated", "epochs": 1, "own_data": True}
    ranks = run(
        tmp_path / "two", free_port, strategy="ddp", devices=2, batch_size=10, use_distributed_sampler=False, **options
    )
    one = run_alone(tmp_path / "one", batch_size=20, **options)
    for rank in ranks:
        assert torch.equal(rank["confusion"]["val"], one["confusion"]["val"])
        assert rank["fairness"] == one["fairness"]
    assert list(one["fairness"]["history"][0]["group_accuracies"]) == ["a", "b", "c"]
