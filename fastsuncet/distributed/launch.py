"""Turn a command into ranks: one process, one process per GPU of this machine, or the ranks that a cluster started.

    nothing               one GPU or none: this process is the only rank
    nothing               several GPUs: this process starts one rank per GPU through torchrun's own agent
    torchrun              RANK, WORLD_SIZE and LOCAL_RANK are set: join
    srun, task per GPU    SLURM_PROCID and SLURM_NTASKS are set: join
    srun, task per node   one Slurm task on each of several nodes: torchrun's agent on each, meeting at the first node

torchrun's command line turns every failure into exit code 1. The agent that is started from here passes on the code of
the rank that failed first: it tells a scheduler to requeue the job (75) or never to retry it (2).
"""

import contextlib
import functools
import inspect
import itertools
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fastsuncet.distributed.signals import STOP_SIGNALS
from fastsuncet.errors import ConfigError, FastSuncetError, HungError, Preempted
from fastsuncet.paths import cli_command

PORT = 29511
START = timedelta(minutes=30)  # how long ranks wait for all of them to start
REASONS = (2, 3, 4, 5, 75, 124)  # exit codes that state a reason, see errors.py


@dataclass(frozen=True)
class Place:
    """This process among the ranks, and its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: "gpu[003-006,9],login" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodelist)
    if match is None:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodelist!r}: no host name in it. Set MASTER_ADDR yourself."
        )
    return match[1] + (match[2] or "")


def _number(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return a launcher's variable. Raises ConfigError if it is not a number."""
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {name} is {text!r}, not a number. torchrun and srun set it; otherwise unset it"
        )
    return int(text)


def _world_size() -> int:
    if not (ranks := _number("WORLD_SIZE", 1)):
        raise ConfigError(
            "the environment variable WORLD_SIZE is 0: it counts the processes. Otherwise unset it"
        )
    return ranks


def set_torchrun_variables(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from Slurm's, if Slurm started one task per rank. Changes `environment` in place."""
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return
    tasks = _number("SLURM_NTASKS", 1, environment)
    if tasks == 1 or one_task_per_node(environment):
        return
    local, host = _slurm("SLURM_LOCALID", environment), first_host(_nodes(environment))
    environment.update(RANK=environment["SLURM_PROCID"], WORLD_SIZE=str(tasks), LOCAL_RANK=local)
    # "8(x2)" is two nodes of 8 tasks. Where nodes differ, the first one's number serves for all.
    if here := re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        environment.setdefault("LOCAL_WORLD_SIZE", here[0])
    environment.setdefault("MASTER_ADDR", host)
    environment.setdefault("MASTER_PORT", str(PORT))


def _nodes(environment: Mapping[str, str]) -> str:
    """Return Slurm's list of the step's nodes; the first one of the job need not be among them."""
    return environment.get("SLURM_STEP_NODELIST") or _slurm("SLURM_JOB_NODELIST", environment)


def _slurm(name: str, environment: Mapping[str, str]) -> str:
    if not environment.get(name):
        raise ConfigError(
            f"the environment variable {name} is missing, and SLURM_PROCID is there. srun sets both; otherwise unset "
            "SLURM_PROCID"
        )
    return environment[name]


def one_task_per_node(environment: MutableMapping[str, str]) -> bool:
    """Return whether Slurm started one task on each of several nodes, so that this process starts its node's ranks."""
    nodes, tasks = (_number(name, 1, environment) for name in ("SLURM_NNODES", "SLURM_NTASKS"))
    return nodes > 1 and nodes == tasks and torch.cuda.device_count() > 1


def should_start_ranks(device: str) -> bool:
    """Return whether this process must start one rank per GPU instead of being a rank."""
    set_torchrun_variables(os.environ)
    return "RANK" not in os.environ and device != "cpu" and torch.cuda.device_count() > 1


def expected_ranks(device: str) -> int:
    """Return how many ranks a run that is started this way has: the launcher's number, or one per GPU, or one."""
    set_torchrun_variables(os.environ)
    if "WORLD_SIZE" in os.environ:
        return _world_size()
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    nodes = int(os.environ["SLURM_NNODES"]) if one_task_per_node(os.environ) else 1
    return max(1, gpus) * nodes


def start_ranks(arguments: list[str], status: Path) -> int:
    """Run `fastsuncet ARGUMENTS` on every GPU of this machine; return the exit code of the job.

    `status` is the run's status.json: after a signal, only this file tells a saved run from a killed one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nodes, endpoint = 1, "localhost:0"
    if one_task_per_node(os.environ):
        nodes = int(os.environ["SLURM_NNODES"])
        endpoint = f"{first_host(_nodes(os.environ))}:{PORT}"
    # The agent kills ranks 30 s after it passed on a signal; a save on a busy file system can take longer.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # torchrun's own default, without its warning: as many OpenMP threads as cores in every rank would slow all of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def stop_once(*_: object) -> None:
        # Only once: the agent passes it on and waits for the ranks' save, and a second exception would end that wait.
        for name in stops:
            signal.signal(signal.Signals[name], signal.SIG_IGN)
        raise SignalException("a stop was requested", sigval=signal.SIGTERM)

    # The agent would raise for each repeated SIGTERM, die of SIGUSR1, and hear a SIGHUP that its ranks ignore.
    stops = [name for name in STOP_SIGNALS if name != "SIGINT"]
    for name in stops:
        signal.signal(signal.Signals[name], stop_once)
    handled: dict[str, Any] = {"signals_to_handle": "SIGINT,SIGQUIT"}
    if "signals_to_handle" not in inspect.signature(LaunchConfig).parameters:
        handled = {}  # before torch 2.9 the agent sets its own handlers, and a repeated SIGTERM ends its wait
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=torch.cuda.device_count(),
        run_id=os.environ.get("SLURM_JOB_ID", "fastsuncet"),
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=0,
        monitor_interval=0.5,
        **handled,
    )
    python, *words = cli_command()
    try:
        elastic_launch(config, python)(*words, *arguments)
    except ChildFailedError as error:
        return job_exit_code([(failure.exitcode, failure.timestamp) for failure in error.failures.values()])
    except SignalException as stop:
        # Not saved: the ranks were killed after their grace period. Return the signal's code, 143 for SIGTERM.
        saved = read_status(status).get("state") == "preempted"
        return Preempted.exit_code if saved else 128 + int(stop.sigval)
    return 0


def job_exit_code(failures: Sequence[tuple[int, int]]) -> int:
    """Return the job's exit code, from (exit code, time in seconds) of each rank that failed.

    A rank that fails takes others with it: their connection breaks (1), or the agent ends them by SIGTERM, and after a
    grace period by SIGKILL. The cause is the rank that left with a reason; if there is none, one that was killed; if
    there is none, one that failed. A kill is reported as a shell does it (137, often for memory), so that a scheduler
    can tell it from a program that failed.
    """
    codes = [code if code >= 0 else 128 - code for code, _ in failures]
    first = min(second for _, second in failures)
    # Ranks that fail together can be seen in two adjacent seconds. A grace period takes half a minute or more.
    causes = [code for code, (_, second) in zip(codes, failures) if second <= first + 1]
    # The agent's SIGTERM is never the cause.
    causes = [code for code in causes if code != 128 + signal.SIGTERM] or causes
    return next((code for code in codes if code in REASONS), max(1, *causes))


def read_status(path: Path) -> dict[str, Any]:
    """Return a run's status.json: {"state": "running", "done", "preempted" or "failed", "step": int, ...}, or {}."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return the GPU of this local rank or the CPU, by meta.device. Raises ConfigError if there is no such GPU."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "meta.device is cuda, but no CUDA device can be used here. `fastsuncet doctor` says what is missing; "
            "meta.device=cpu runs without one."
        )
    # torch counts the GPUs of a driver that it cannot use.
    if wanted == "auto" and not available and torch.cuda.device_count() > 0:
        raise ConfigError(
            f"there are {torch.cuda.device_count()} GPUs, but torch (CUDA {torch.version.cuda}) cannot use their "
            "driver: update the driver, or install the torch of its CUDA. meta.device=cpu trains without GPUs."
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and "SLURM_LOCALID" in os.environ:
        local_rank = 0  # Slurm gave each task a GPU of its own and hides the others
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible. "
            "Start one process per GPU (torchrun --nproc-per-node, or srun --ntasks-per-node)."
        )
    return torch.device("cuda", local_rank)


@functools.cache  # one per device: memory that one stream has freed is of no use to another
def work_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a rank does everything, instead of CUDA's default stream.

    The default stream cannot be captured in a graph, and DDP keeps autograd nodes that belong to the stream it was
    built on: a step can be captured only on the stream on which the network was wrapped and warmed up.
    """
    return torch.cuda.Stream(device)


def _store(rank: int, world_size: int, port: str | None) -> Store:
    """Return torch's store with keys of their own for each group that this process joins."""
    return PrefixStore(f"group {next(_groups)}", _server(rank, world_size, port))


@functools.cache  # a process can join again, and the server must outlive its first group
def _server(rank: int, world_size: int, port: str | None) -> Store:
    return next(rendezvous("env://", rank, world_size, timeout=START))[0]


_groups = itertools.count()


@contextlib.contextmanager
def join(device: str, timeout: int = 1800) -> Iterator[Place]:
    """Join the ranks that the launcher's variables describe (none: a single rank), and leave them at the end.

    A collective that waits longer than `timeout` seconds raises HungError. While training runs, heartbeat.py ends the
    job earlier, with the name of the rank.
    """
    set_torchrun_variables(os.environ)
    rank, world_size, local_rank = _number("RANK", 0), _world_size(), _number("LOCAL_RANK", 0)
    if rank >= world_size:
        raise ConfigError(
            f"the environment variable RANK is {rank}, and WORLD_SIZE is {world_size}: RANK must be below"
        )
    place = Place(rank, world_size, local_rank, pick_device(device, local_rank))
    cuda = place.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(place.device)
        torch.cuda.set_stream(work_stream(place.device))
    if world_size == 1 or dist.is_initialized():
        yield place
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but these environment variables are missing: {', '.join(missing)}. Start "
            "with torchrun or srun, set them to the host and a free port of rank 0, or unset WORLD_SIZE for one process"
        )
    try:
        dist.init_process_group(
            # One group, two transports: CPU tensors (stop requests, file-system news) never queue behind the GPU's
            # stream.
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=_store(rank, world_size, os.environ.get("MASTER_PORT")),
            timeout=timedelta(seconds=timeout + 60),
            rank=rank,
            world_size=world_size,
            device_id=place.device if cuda else None,
        )
        yield place
    except Preempted:
        dist.destroy_process_group()  # every rank leaves this way at the same time
        raise
    except RuntimeError as error:
        if (explained := explain_error(error)) is error:
            raise
        raise explained from error
    # Not after any other error: taking a group down can wait for ranks that are stuck in a collective, and the error
    # message would wait with it.
    dist.destroy_process_group()


def explain_error(error: BaseException) -> BaseException:
    """Return the error to show for `error`: if another rank's connection broke, an error that says so."""
    if isinstance(error, RuntimeError) and re.search(
        r"Connection (closed|reset)|NCCL.*(remote|abort)", str(error)
    ):
        return FastSuncetError(
            "another rank has ended, and this one with it; the other rank's message has the reason"
        )
    if isinstance(error, RuntimeError) and re.search(r"[Tt]imed? ?out", str(error)):
        return HungError(
            f"a rank did not come for longer than meta.timeout ({str(error).splitlines()[0]}). The same command "
            "continues from the newest checkpoint"
        )
    return error
