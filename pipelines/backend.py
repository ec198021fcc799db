"""The options of pixels: which back-end makes them, on which device and threads, and how to install what is missing."""

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipelines.data_errors import DataError
from pipelines.output import say_once

if TYPE_CHECKING:  # a program without torch can ask what is missing
    import torch

# The time that a container (cgroup v2) is given: "400000 100000" is 4 cores, "max 100000" has no limit.
QUOTA = Path("/sys/fs/cgroup/cpu.max")
# Threads of one stream by default: more do not speed up a GPU's decoder, and each has its own buffers.
MOST = 16
# How torch, CUDA, its driver and libraries, NCCL and DALI name a lack of memory.
NO_MEMORY = re.compile(
    r"(?i).*(can't allocate|alloc(ation)?[ _]failed|bad_alloc|out[ _]of[ _]memory|failed to CUDA .*alloc).*"
)

Backend = Literal["auto", "dali", "torchvision"]  # auto: DALI where it can be imported


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader makes pixels. On a CPU nothing but `backend` changes a bit.

    With DALI on a GPU `hw_decoder_share` of each batch, 0 to 1, goes to the hardware JPEG decoder. With DALI's default,
    0.65, two decoders whose pixels can differ share a batch, sorted by subsampling and area: an image's pixels would
    depend on its neighbors, and two ranks would not see what one sees. The price of 0 is throughput (on an A100
    6,000 images/s, 7,000 with 0.75: NVIDIA/DALI issue 5362). On an H200 pixels depended on nothing else at 0 and at 1,
    and a step took longer at 1 (BENCHMARKS.md).
    """

    backend: Backend = "auto"
    device: Literal["cpu", "gpu"] = "cpu"  # cpu: `threads` threads decode and augment
    device_id: int = 0  # of the GPU
    threads: int = 3
    prefetch: int = 2  # steps prepared ahead
    # What makes a view of the resized image with DALI. True: `pipelines.dali.view_operator`; False: DALI's operators;
    # auto: the view operator on a CPU where it can be built.
    view_operator: bool | Literal["auto"] = "auto"
    hw_decoder_share: float = 0.0


def choose_backend(backend: str) -> Literal["dali", "torchvision"]:
    """Return which back-end "auto", "dali" or "torchvision" is here.

    "auto" without DALI is torchvision and prints how to install DALI. Raises DataError when "dali" is asked for and
    cannot be imported.
    """
    if backend == "torchvision":
        return "torchvision"
    problem = dali_problem()
    if problem is None:
        return "dali"
    if backend == "dali":
        raise DataError(f"DALI cannot be used here ({problem}). Install it with: {install_command()}")
    say_once(
        f"DALI cannot be used here ({problem}): torchvision reads the images instead, with the same views "
        f"but much slower. Install DALI with: {install_command()}"
    )
    return "torchvision"


def dali_problem() -> str | None:
    """Return why `nvidia.dali` cannot be imported (absent, or without a library it needs); None if it can."""
    try:
        importlib.import_module("nvidia.dali")
    except (ImportError, OSError) as error:
        return str(error)
    return None


# torch is imported where it is used: `fastsuncet doctor` says what is missing where it is.
def install_command() -> str:
    """Return the pip command for the DALI build that goes with this torch: there is one per CUDA generation."""
    import torch

    generation = "130" if (torch.version.cuda or "").startswith("13") else "120"
    return f"pip install 'nvidia-dali-cuda{generation}>=2.2,<3'"


def require_gpu() -> None:
    """Raise DataError where no GPU can be used: shorter than what DALI and torch would say."""
    import torch

    if not torch.cuda.is_available():
        raise DataError("no NVIDIA GPU with a working driver is visible: see nvidia-smi, or use device cpu")


def lack_of_gpu_memory(error: RuntimeError) -> str | None:
    """Return the sentences in which an error says that a GPU has too little memory; None for another error."""
    found = NO_MEMORY.search(str(error))
    line = found[0] if found else str(error).partition("\n")[0]
    # torch's own error, by its name because not every command imports torch. A library that takes memory of its own and
    # a kernel that is loaded raise others.
    if type(error).__name__ != "OutOfMemoryError" and not (found and re.search("(?i)cu(da|blas|dnn)", line)):
        return None
    return ". ".join(line.split(". ")[:2])


def cores() -> int:
    """Return the number of cores this process can run on, at most as many as its container has time for."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="utf-8").split()
    except (OSError, ValueError):  # no such file, or another format: no known limit
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


def processes_here(unknown: int = 1) -> int:
    """Return how many processes of the run share this machine, as its launcher says; `unknown` where it does not."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else unknown


def cores_of_process() -> int:
    """Return this process's share of the cores that all processes of the run on this machine can use."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_CPUS_ON_NODE" not in os.environ:
        return cores() // processes_here()
    # A Slurm task for each process can be bound to its share of the node or see all of it.
    return min(cores(), int(os.environ["SLURM_CPUS_ON_NODE"]) // processes_here())


def decode_threads(asked: int | None, streams: int = 1) -> int:
    """Return `asked`, or the share of the cores of one of a process's `streams` that decode at the same time."""
    return max(1, min(MOST, cores_of_process() // streams)) if asked is None else asked


def to_device(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """Return `tensor`, with its strides, on `device`, without waiting for it."""
    if device.type == "cuda" and not tensor.is_cuda:
        # A copy from pageable memory can hold the host up until the GPU reaches it, `non_blocking` or not.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
