"""Real processes that start at once: they are forked from one that has already imported what takes long."""

import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

_SLOW_TO_IMPORT = ["lightning.pytorch.cli", "matplotlib.pyplot", "tensorboard", "torch.distributed", "torchvision"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_SLOW_TO_IMPORT)


def start(function, *arguments, output, limit=120, folder=None, **environment):
    """Call a function in a process of its own, in a folder, with more environment variables, printing into files.

    After `limit` seconds the process is killed, even if nobody waits for it any more.
    """
    process = _CONTEXT.Process(
        target=_call, args=(function, arguments, str(output), limit, folder and str(folder), environment)
    )
    process.start()
    return process


def run_script(script, *arguments, output, limit=300, folder=None):
    """Run a script (a file, or a module by its name) as its user does; return what it printed and its exit code."""
    process = start(_run_as_main, str(script), list(map(str, arguments)), output=output, limit=limit, folder=folder)
    process.join()
    printed, errors = (Path(f"{output}.{name}").read_text() for name in ("out", "err"))
    return SimpleNamespace(returncode=process.exitcode, stdout=printed, stderr=errors)


def _call(function, arguments, output, limit, folder, environment):
    signal.alarm(limit)  # nobody handles it, so that it ends the process
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update({name: str(value) for name, value in environment.items()})
    if "RANK" in environment:
        _forget_rank_of_the_import()
    torch.set_num_threads(1)
    if folder is not None:
        os.chdir(folder)
    function(*arguments)


def _forget_rank_of_the_import():
    """Set what Lightning reads from the environment when it is imported."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    rank_zero_only.rank = _get_rank()


def _run_as_main(script, arguments):
    sys.argv = [script, *arguments]
    if Path(script).exists():
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
