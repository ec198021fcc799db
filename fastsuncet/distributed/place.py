"""This process's place among the ranks of its command, and its device: found, joined and left.

nothing               one GPU or none: this process is the only rank
nothing               several GPUs: this process starts one rank per GPU (launch.py)
torchrun              RANK, WORLD_SIZE and LOCAL_RANK are set: join
srun, task per GPU    SLURM_PROCID and SLURM_NTASKS are set: join
srun, task per node   one Slurm task on each of several nodes: each starts one rank per GPU (launch.py), and with
                      meta.device=cpu it is a rank
"""

import contextlib
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fastsuncet.errors import ConfigError, FastSuncetError, HungError, Preempted
from pipelines.output import counted, say_line

NOTICE = 20.0  # seconds, after which a rank says what it waits for
START = timedelta(minutes=30)  # how long ranks wait for all of them to start
CONNECT = timedelta(minutes=5)  # to the store of torchrun's agent, which serves it before it starts ranks


@dataclass(frozen=True)
class Place:
    """This process among the ranks, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        """True where this rank computes on a GPU, and can have fast paths (tuning/fast_paths.py)."""
        return self.device.type == "cuda"

    def say(self, *lines: str) -> None:
        """Print lines, on the first rank alone."""
        for line in lines if self.first else ():
            say_line(line)


def _number(name: str, default: int) -> int:
    """Return a launcher's variable. Raises ConfigError if it is not a number."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} is {text!r}, not a number: correct or unset it")
    return int(text)


def set_torchrun_variables(device: str) -> None:
    """Set torchrun's environment variables from Slurm's, if Slurm started one task per rank."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ:
        return
    tasks = _number("SLURM_NTASKS", 1)
    if tasks == 1 or nodes_to_start(device) > 1:
        return
    local, (host, port) = _slurm("SLURM_LOCALID"), slurm_endpoint()
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=str(tasks), LOCAL_RANK=local)
    # "8(x2)" is two nodes of 8 tasks. Where nodes differ, the first one's number serves for all.
    if here := re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        os.environ.setdefault("LOCAL_WORLD_SIZE", here[0])
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))


def slurm_endpoint() -> tuple[str, int]:
    """Return where the ranks of a Slurm step meet: its first host, and a port that jobs that share it do not have."""
    # The first node of the job need not be one of the step. A list is compressed: "gpu[003-006,9],login".
    nodes = os.environ.get("SLURM_STEP_NODELIST") or _slurm("SLURM_JOB_NODELIST")
    nodes = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes)
    return nodes.partition(",")[0], 20_000 + _number("SLURM_JOB_ID", 9_511) % 10_000


def _slurm(name: str) -> str:
    if not os.environ.get(name):
        raise ConfigError(
            f"the environment variable {name} is missing. srun sets it; else unset SLURM_PROCID"
        )
    return os.environ[name]


def _gpus(device: str) -> int:
    """Return how many GPUs of this machine a run on meta.device can have."""
    return 0 if device == "cpu" else torch.cuda.device_count()


def nodes_to_start(device: str) -> int:
    """Return on how many nodes Slurm started one task that starts the ranks of its node; 1 where it did otherwise."""
    nodes, tasks = (_number(name, 1) for name in ("SLURM_NNODES", "SLURM_NTASKS"))
    return nodes if nodes == tasks and _gpus(device) > 1 else 1


def should_start_ranks(device: str) -> bool:
    """Return whether this process must start one rank per GPU instead of being a rank."""
    set_torchrun_variables(device)
    return "RANK" not in os.environ and _gpus(device) > 1


def expected_ranks(device: str) -> int:
    """Return how many ranks a run that is started this way has: the launcher's number, or one per GPU, or one."""
    set_torchrun_variables(device)
    if "WORLD_SIZE" in os.environ:
        return max(1, _number("WORLD_SIZE", 1))
    return max(1, _gpus(device)) * nodes_to_start(device)


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return the GPU of this local rank or the CPU, by meta.device. Raises ConfigError if torch cannot use it."""
    gpus, available = torch.cuda.device_count(), torch.cuda.is_available()
    # torch counts the GPUs of a driver that it cannot use.
    if not available and (wanted == "cuda" or (wanted == "auto" and gpus > 0)):
        cause = "the container was started without --gpus all, or there is no driver"
        if gpus:
            cause = f"torch counts {gpus} and cannot use their driver: update it, or install the torch of its CUDA"
        raise ConfigError(
            f"meta.device is {wanted}, but no CUDA device can be used here (torch is built for CUDA "
            f"{torch.version.cuda}): {cause}. meta.device=cpu runs without one"
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    if gpus == 1 and "SLURM_LOCALID" in os.environ:
        local_rank = 0  # Slurm gave each task a GPU of its own and hides the others
    if local_rank >= gpus:
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: {gpus} are visible. "
            "Start one process per GPU (torchrun --nproc-per-node, or srun --ntasks-per-node)."
        )
    if problem := code_problem(local_rank):
        raise ConfigError(f"{problem}. Install a torch for this GPU, or set meta.device=cpu")
    return torch.device("cuda", local_rank)


def code_problem(number: int) -> str | None:
    """Return that torch has no code for a card, neither of its generation nor to be compiled for it; None if it has."""
    card, names = torch.cuda.get_device_properties(number), torch.cuda.get_arch_list()
    for kind, version in (name.split("_") for name in names):  # sm_90, sm_90a, compute_120
        digits = version.rstrip("af")
        there = int(digits[:-1]), int(digits[-1])
        if there <= (card.major, card.minor) and (there[0] == card.major or kind == "compute"):
            return None
    return f"this torch has no code for {card.name}, {card.major}.{card.minor}: it has {' '.join(names)}"


@functools.cache  # one per device: memory that one stream has freed is of no use to another
def work_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a rank does everything: CUDA's default stream cannot be captured in a graph.

    DDP keeps autograd nodes of the stream that it was built on, so a step must be captured on that one.
    """
    return torch.cuda.Stream(device)


def _store(rank: int, world_size: int, port: str | None) -> Store:
    """Return torch's store under a prefix that only the processes of this group know.

    The store of torchrun's agent outlives ranks that it restarts, and still has the addresses of those that ended. So
    rank 0 draws the prefix, and a rank takes it only as the answer to a key that this rank has drawn.
    """
    server, drawn = _server(rank, world_size, port), os.urandom(8).hex()
    if rank == 0:
        server.set("prefix", drawn)
        for other in range(1, world_size):
            server.set(server.get(f"{drawn} {other}").decode(), drawn)
        return PrefixStore(drawn, server)
    while not server.check([drawn]):  # "prefix" can be that of a rank 0 that has ended
        server.set(f"{server.get('prefix').decode()} {rank}", drawn)
        time.sleep(0.1)
    return PrefixStore(server.get(drawn).decode(), server)


def agent_holds_store() -> bool:
    """Return whether torchrun's agent holds the store through which ranks meet, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@functools.cache  # a process can join again, and the server must outlive its first group
def _server(rank: int, world_size: int, port: str | None) -> Store:
    # A rank whose agent was killed before it could ask to end with it would wait here.
    timeout = CONNECT if agent_holds_store() else START
    store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
    store.set_timeout(START)
    return store


@contextlib.contextmanager
def join(device: str, timeout: int = 1800) -> Iterator[Place]:
    """Join the ranks that the launcher's variables describe (none: a single rank), and leave them at the end.

    On a GPU `work_stream` is current until then. A collective that waits longer than `timeout` seconds raises
    HungError; while training runs, heartbeat.py ends the job earlier, with the name of the rank.
    """
    set_torchrun_variables(device)
    rank, world_size, local_rank = _number("RANK", 0), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0)
    if rank >= world_size:
        raise ConfigError(f"RANK is {rank}, and WORLD_SIZE is {world_size}: RANK must be below")
    if dist.is_initialized() and dist.get_world_size() != world_size:
        raise ConfigError(
            f"this program has a process group of {counted(dist.get_world_size(), 'rank')}, and WORLD_SIZE says "
            f"{world_size}: set RANK, WORLD_SIZE and LOCAL_RANK as torchrun does, or train without a group"
        )
    place = Place(rank, world_size, pick_device(device, local_rank))
    with contextlib.ExitStack() as stack:
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
            stack.enter_context(torch.cuda.stream(work_stream(place.device)))
        if world_size > 1 and not dist.is_initialized():
            stack.enter_context(_group(place, timeout))
        yield place


@contextlib.contextmanager
def _group(place: Place, timeout: int) -> Iterator[None]:
    """Make the process group of several ranks, and destroy it at the end."""
    rank, world_size, cuda = place.rank, place.world_size, place.device.type == "cuda"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(
                f"WORLD_SIZE is {world_size}, and the environment variable {name} is missing: start with torchrun or "
                "srun, or unset WORLD_SIZE for one process"
            )
    if not 0 < _number("MASTER_PORT", 0) < 65_536:
        raise ConfigError(f"MASTER_PORT is {os.environ['MASTER_PORT']}, and a port is from 1 to 65535")
    others, where = counted(world_size - 1, "other rank"), "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    awaited = (
        f"[rank {rank}] waiting for {others} at {where}, {START.total_seconds() / 60:.0f} minutes at most. Each rank "
        "is a process: in a Slurm script write srun before the command, elsewhere start it with torchrun. For a single "
        "process set WORLD_SIZE=1, or in a Slurm script SLURM_NTASKS=1"
    )
    notice = threading.Timer(NOTICE, say_line, (awaited, sys.stderr))
    notice.daemon = True
    notice.start()
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
        notice.cancel()
        yield
    except Preempted:
        dist.destroy_process_group()  # every rank leaves this way at the same time
        raise
    except RuntimeError as error:
        if (explained := explain_error(error)) is error:
            raise
        raise explained from error
    finally:
        notice.cancel()
    # Not after any other error: taking a group down can wait for ranks that are stuck in a collective, and the error
    # message would wait with it.
    dist.destroy_process_group()


def explain_error(error: BaseException) -> BaseException:
    """Return the error to show for `error`: one for the user where the cause is another rank or the machine."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if re.search(r"Connection (closed|reset)|NCCL.*(remote|abort)", text):
        return FastSuncetError(
            "another rank has ended, and this one with it; its message has the reason, unless it was killed"
        )
    if "shared memory segment" in text:
        return ConfigError(
            "NCCL has too little room in /dev/shm: start the container with --shm-size=1g, or give its pod a volume in "
            "memory there"
        )
    if "EADDRINUSE" in text:
        return ConfigError(
            f"MASTER_PORT is {os.environ.get('MASTER_PORT')}, and another process on this machine uses that port. Set "
            "it to a free one, the same for all ranks"
        )
    if re.search(r"[Tt]imed? ?out", text):
        what = "a rank did not come for longer than meta.timeout"
        if "trying to connect" in text:
            what = "nothing answers at MASTER_ADDR and MASTER_PORT, where rank 0's process or torchrun's agent must be"
        return HungError(f"{what} ({text.splitlines()[0]}). The same command continues from what was saved")
    return error
