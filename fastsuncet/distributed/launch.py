"""How a command becomes ranks: one process, one a GPU of this machine, or a place among those a cluster started.

    nothing            one GPU or none: this process is the only rank
    nothing            several GPUs: one process each through torchrun's own agent, started from here
    torchrun           RANK, WORLD_SIZE and LOCAL_RANK are set: join
    srun, task a GPU   SLURM_PROCID and SLURM_NTASKS are set: join
    srun, task a node  one Slurm task on each of several nodes: torchrun's agent on each, meeting at the first node

torchrun's command line turns every failure into exit code 1. The agent started from here passes on the code of the
rank that failed first, because a scheduler decides by it whether to requeue (75) or never to retry (2).
"""

import contextlib
import functools
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fastsuncet.console import cli_command
from fastsuncet.errors import ConfigError, FastSuncetError, Preempted

PORT = 29511
# Ranks that stop talking end the job instead of holding its GPUs: longer than any save or scan.
# (The first rank scans a new data set while the others wait: a million headers on a cold disk take a while.)
TIMEOUT = timedelta(minutes=30)
REASONS = (2, 3, 4, 5, 75)  # exit codes that say why, see errors.py


@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank among `world_size`, and the device that is its own."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on the one rank that writes files and talks to a person."""
        return self.rank == 0


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: "gpu[003-006,9],login" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?([^,\[\]]*)", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST is {nodelist!r}: no host name in it. Set MASTER_ADDR by hand.")
    prefix, number, _ = match.groups()
    return prefix + (number or "")


def adopt_slurm(environment: dict[str, str]) -> None:
    """Gives `environment` torchrun's variables from Slurm's, where there is one task a rank. Changes it in place."""
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return
    tasks = int(environment.get("SLURM_NTASKS", 1))
    if tasks == 1 or one_task_a_node(environment):
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = str(tasks)
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    environment.setdefault("MASTER_ADDR", first_host(nodes))
    environment.setdefault("MASTER_PORT", str(PORT))


def one_task_a_node(environment: dict[str, str]) -> bool:
    """True where Slurm started one task on each of several nodes and left the GPUs of a node to us."""
    nodes, tasks = int(environment.get("SLURM_NNODES", 1)), int(environment.get("SLURM_NTASKS", 1))
    return nodes > 1 and nodes == tasks and torch.cuda.device_count() > 1


def should_start_ranks(device: str) -> bool:
    """True if this process is to start one rank a GPU instead of being one."""
    adopt_slurm(os.environ)
    return "RANK" not in os.environ and device != "cpu" and torch.cuda.device_count() > 1


def expected_ranks(device: str) -> int:
    """How many processes a run started this way would have: what the launcher says, or one a GPU, or one."""
    adopt_slurm(os.environ)
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    nodes = int(os.environ["SLURM_NNODES"]) if one_task_a_node(os.environ) else 1
    return max(1, gpus) * nodes


def start_ranks(arguments: list[str], status: Path) -> int:
    """Runs `fastsuncet ARGUMENTS` on every GPU of this machine; returns the exit code of the job.

    `status` is the run's status file: after a signal the agent cannot tell a saved run from a killed one, the file can.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nodes, endpoint = 1, "localhost:0"
    if one_task_a_node(os.environ):
        nodes = int(os.environ["SLURM_NNODES"])
        endpoint = f"{first_host(os.environ['SLURM_JOB_NODELIST'])}:{PORT}"
    # The agent kills ranks 30 s after passing on a signal; a save on a busy file system can take longer.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # As many OpenMP threads as cores in every rank would slow all: torchrun's own default, without its warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # The agent passes on SIGTERM and friends but would die of these.
        signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=torch.cuda.device_count(),
        run_id=os.environ.get("SLURM_JOB_ID", "fastsuncet"),
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        python, *words = cli_command()
        elastic_launch(config, python)(*words, *arguments)
    except ChildFailedError as error:
        return exit_code([(failure.exitcode, failure.timestamp) for failure in error.failures.values()])
    except SignalException as stop:
        # Not saved: the ranks were killed after their grace period. Told as the signal, 143 for SIGTERM.
        saved = read_status(status).get("state") == "preempted"
        return Preempted.exit_code if saved else 128 + int(stop.sigval)
    return 0


def exit_code(failures: Sequence[tuple[int, int]]) -> int:
    """The job's exit code, from (exit code, the second it was seen) of each rank that did not end well.

    A rank that fails takes others with it: their connection breaks (1), or the agent ends them by SIGTERM, which is
    never what ended a job, and after its grace period by SIGKILL. What ended it is the rank that left with a reason;
    else one that was killed; else one that failed. A kill is told as a shell tells it (137: memory, often), so that a
    scheduler can tell it from a program that failed.
    """
    codes = [code if code >= 0 else 128 - code for code, _ in failures]
    first = min(second for _, second in failures)
    # What failed together may be seen on both sides of a second; a grace period is half a minute at least.
    causes = [code for code, (_, second) in zip(codes, failures) if second <= first + 1]
    echo = 128 + signal.SIGTERM
    causes = [code for code in causes if code != echo] or causes
    return next((code for code in codes if code in REASONS), max(1, *causes))


def read_status(path: Path) -> dict:
    """The run's last word about itself: {"state": "running"|"done"|"preempted"|"failed", "step": int, ...}, or {}."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` takes the GPU of this local rank where there is one; `cuda` insists on it."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "meta.device is cuda, but no CUDA device can be used here. `fastsuncet doctor` says what is missing; "
            "meta.device=cpu runs without one."
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and "SLURM_LOCALID" in os.environ:
        local_rank = 0  # Slurm gave each task a GPU of its own and hides the others
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible. "
            "Start one process a GPU (torchrun --nproc-per-node, or srun --ntasks-per-node)."
        )
    return torch.device("cuda", local_rank)


@functools.cache  # one a device: memory that one stream let go of is of no use to another
def work_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream a rank does everything on, from its first tensor to its last step; not CUDA's default one.

    The default stream cannot be captured in a graph, and DDP keeps nodes of autograd that belong to the stream it was
    built on: a step can be captured only on the stream on which the network was wrapped and warmed up.
    """
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def join(device: str) -> Iterator[Place]:
    """Joins the ranks the launcher's variables describe (none: a world of one), and leaves them at the end."""
    adopt_slurm(os.environ)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = Place(rank, world_size, local_rank, pick_device(device, local_rank))
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        torch.cuda.set_stream(work_stream(place.device))
    if world_size == 1 or dist.is_initialized():
        yield place
        return
    # One group, two transports: CPU tensors (the vote to stop, file-system news) never queue behind the GPU's stream.
    backend = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo"
    keywords = {"device_id": place.device} if place.device.type == "cuda" else {}
    dist.init_process_group(backend, timeout=TIMEOUT, rank=rank, world_size=world_size, **keywords)
    try:
        yield place
    except Preempted:
        dist.destroy_process_group()  # every rank leaves this way together
        raise
    # After any other error no farewell: taking a group down can wait for ranks that are stuck in a gather, and the
    # message would wait with it.
    dist.destroy_process_group()


def explain_error(error: BaseException) -> BaseException:
    """The error to show for `error`: where another rank went away, that is what happened, and its message says why."""
    if isinstance(error, RuntimeError) and re.search(
        r"Connection (closed|reset)|NCCL.*(remote|abort)", str(error)
    ):
        return FastSuncetError("another rank has ended, and this one with it; its own message says why")
    return error
