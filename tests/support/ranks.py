"""Run a function on real ranks: one process each, connected by gloo, as `torchrun` starts them."""

import functools
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # imported here once, and not by each rank at its first DistributedDataParallel
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import pipelines.dali.engine  # noqa: F401 - as above, at a rank's first batch

ROOT = Path(__file__).resolve().parents[2]
OURS = ("fastsuncet", "pipelines", "tests", "tools")


def drop_files(*kept: int) -> None:
    """Point every open file but `kept` to /dev/null: pytest's log would go to the next file that gets its number."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            os.dup2(null, number)


def _fork(path: str, arguments: list[str], descriptors: list[int]) -> int:
    """Run the program that follows `python -c` in a fork of this process; return its process ID."""
    if pid := os.fork():
        return pid
    try:
        # pytest's files, to which loggers of torch write, get the numbers of standard output and standard error.
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            if isinstance(stream.buffer, io.FileIO):
                stream.buffer.__init__(number, "w", closefd=False)
        drop_files(*descriptors)
        # By it the agent names the function of each event, for a second a job: it reads the source of all callers.
        dynamic_rendezvous.get_method_name = lambda depth=2: ""
        exec(arguments[-1])
    finally:
        os._exit(0)


@functools.cache
def start_server() -> None:
    """Start the server of `start_forked` as a fork of this process, which must have started no threads.

    The server that multiprocessing would start takes seven seconds to import what this process has imported.
    """
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def start_forked(function: Callable[..., Any], *arguments: Any) -> multiprocessing.Process:
    """Start `function(*arguments)`, of a module, in a process forked from a server that has everything imported."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    return process


def run_code(code: str, packages: Path, folder: Path) -> tuple[int | None, str]:
    """Run Python code in `folder`; return its exit code and output. It imports our modules anew, from `packages`.

    A new process would take three seconds more to import torch, and three for torchvision.
    """
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        process = start_forked(_run_code, code, packages, folder, output.name)
        process.join()
        return process.exitcode, output.read()


def _run_code(code: str, packages: Path, folder: Path, output: str) -> None:
    with open(output, "w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.chdir(folder)
    sys.path[:] = [str(packages), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    exec(code, {"__name__": "__main__"})


def started_by_an_agent(rank: int, port: int) -> None:
    """Set the variables of one of two ranks whose agent, the test, holds the store at `port`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def _rank_main(rank: int, world_size: int, folder: str, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    # A file store needs no free port, so any number of these can run at the same time.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        result = function(rank, world_size, *arguments)
        torch.save(result, f"{folder}/result_{rank}.pt")
    except BaseException:
        with open(f"{folder}/error_{rank}.txt", "w") as stream:
            stream.write(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Call the module-level `function(rank, world_size, *arguments)` on every rank; return results in rank order.

    Results can hold tensors and plain Python types. A failing rank fails the caller with that rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                _rank_main, (world_size, folder, function, arguments), world_size, start_method="forkserver"
            )
        except Exception as error:
            reports = [
                f"rank {rank}:\n{Path(path).read_text()}"
                for rank in range(world_size)
                if os.path.exists(path := f"{folder}/error_{rank}.txt")
            ]
            raise AssertionError("\n".join(reports) or str(error)) from error
        return [torch.load(f"{folder}/result_{rank}.pt", weights_only=True) for rank in range(world_size)]


def is_alive(pid: int) -> bool:
    """Return whether a process still runs some time after it was killed."""
    status, ends = Path(f"/proc/{pid}/status"), time.monotonic() + 10
    # A dead one that its new parent has not collected yet is a zombie.
    while status.exists() and "zombie" not in status.read_text():
        if time.monotonic() > ends:
            return True
        time.sleep(0.05)
    return False
