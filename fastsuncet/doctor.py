"""`fastsuncet doctor`: one page on what is installed here, what is missing, and what to do about it.

Each examination looks at one thing, by using it where that is cheap: DALI decodes an image, NVRTC compiles
a kernel. "absent" is what a run does without; "problem" is what would stop one, and makes the exit code 1.
"""

import ctypes
import importlib
import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as installed
from pathlib import Path

GIGA = 1e9
# A ResNet-50's weights and momentum are 0.2 GB, and a save holds one set more than it keeps.
DISK_NEEDED = 1 * GIGA
# NCCL passes data between the GPUs of one machine through here; Docker's default of 64 MB is too little.
SHM_NEEDED = 0.25 * GIGA


@dataclass(frozen=True)
class Finding:
    """What an examination found: state "ok", "absent" or "problem", the facts, and what to do about them."""

    state: str
    facts: str
    advice: str = ""


def doctor(write: Callable[[str], object] = print, examinations: "Examinations | None" = None) -> int:
    """Examines this machine, writes the page as it goes; returns the exit code, 1 if anything would stop a
    run.
    """
    problems = []
    for name, look in EXAMINATIONS if examinations is None else examinations:
        finding = _examine(look)
        write(f"{name:<12} {finding.state:<8} {finding.facts}")
        if finding.advice:
            write(f"{'':<21} -> {finding.advice}")
        if finding.state == "problem":
            problems.append(name)
    write("")
    if problems:
        write(f"{', '.join(problems)}: see the advice above; a run would stop or fail there.")
        return 1
    write("`fastsuncet train` can run here. What is absent is not needed, or something stands in for it.")
    return 0


def _examine(look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:  # whatever is broken about a package, the page must be finished
        return Finding(
            "problem", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", "install it anew"
        )


def python() -> Finding:
    """The interpreter against the versions the project is tested with."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Finding("ok", version)
    return Finding("problem", version, "use Python 3.10 to 3.13")


def required(name: str) -> Callable[[], Finding]:
    """An examination of a package of pyproject.toml: importable, and within the bounds given there."""

    def look() -> Finding:
        try:
            importlib.import_module({"pyyaml": "yaml", "pillow": "PIL"}.get(name, name))
            version = installed(name)
        except (ImportError, PackageNotFoundError) as error:
            return Finding("problem", f"not installed ({error})", f"pip install '{_bounds(name)}'")
        if not _within(version, _bounds(name)):
            return Finding(
                "problem", f"{version}, tested with {_bounds(name)}", f"pip install '{_bounds(name)}'"
            )
        return Finding("ok", version)

    return look


def _bounds(name: str) -> str:
    """The requirement as pyproject.toml has it: "torch>=2.11,<2.16"."""
    try:
        lines = requires("fastsuncet") or []
    except PackageNotFoundError:  # a bare checkout
        return name
    return next((re.sub(r"\s", "", line) for line in lines if re.match(rf"{name}\b[^;]*$", line, re.I)), name)


def _within(version: str, requirement: str) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])

    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all((numbers(version) >= numbers(at)) == (sign == ">=") for sign, at in bounds)


def gpu() -> Finding:
    """The GPUs torch can use, or why it can use none."""
    import torch

    driver = Path("/proc/driver/nvidia/version")
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        kinds = {(card.name, card.total_memory, card.major, card.minor) for card in cards}
        described = [f"{name}, {memory / GIGA:.0f} GB, {a}.{b}" for name, memory, a, b in sorted(kinds)]
        text = f"{len(cards)} x {'; '.join(described)} (CUDA {torch.version.cuda})"
        if min(card.major for card in cards) < 8:
            return Finding("ok", text, "no bfloat16 in hardware: set meta.precision=fp16")
        return Finding("ok", text)
    if torch.version.cuda is None:
        return Finding("absent", "this torch is built without CUDA", "training runs on the CPU")
    if driver.exists():
        line = driver.read_text().splitlines()[0]
        return Finding(
            "problem",
            f"there is a driver, but torch (CUDA {torch.version.cuda}) cannot use it: {line}",
            "update the driver; in a container start it with --gpus all",
        )
    return Finding(
        "absent",
        f"no NVIDIA driver (torch is built for CUDA {torch.version.cuda})",
        "training runs on the CPU",
    )


def nccl() -> Finding:
    """The library that GPUs talk through."""
    import torch

    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return Finding(
            "absent", "this torch has none", "needed only for several GPUs; processes on CPUs use gloo"
        )
    return Finding("ok", ".".join(map(str, torch.cuda.nccl.version())))


def nvrtc() -> Finding:
    """The run-time compiler of CUDA sources, by compiling one."""
    import torch

    if torch.version.cuda is None:
        return Finding("absent", "this torch is built without CUDA", "needed only on a GPU")
    library = next((lib for name in _nvrtc_names(torch.version.cuda) if (lib := _load(name))), None)
    if library is None:
        return Finding(
            "absent", "libnvrtc is not found", "kernels of our own stay off; PyTorch's stand in for them"
        )
    program, source = ctypes.c_void_p(), b'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }'
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"f.cu", 0, None, None)
    code = library.nvrtcCompileProgram(program, 0, None)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    text = f"{major.value}.{minor.value}"
    if code:
        return Finding(
            "absent", f"{text} compiles nothing (code {code})", "PyTorch's kernels stand in for ours"
        )
    return Finding("ok", f"{text}, compiled a kernel")


def _nvrtc_names(cuda: str) -> Iterable[str]:
    yield f"libnvrtc.so.{cuda.split('.')[0]}"
    nvidia = importlib.util.find_spec("nvidia")  # where the wheels of CUDA's libraries lie
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        yield from sorted(map(str, Path(folder).glob(f"*/lib/libnvrtc.so.{cuda.split('.')[0]}")))


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def dali() -> Finding:
    """DALI, by decoding a JPEG of our own with it: on the CPU, and on the GPU where there is one."""
    from pipelines.backend import dali_problem, install_command

    problem = dali_problem()
    if problem is not None:
        return Finding(
            "absent", problem, f"{install_command()}; until then torchvision reads the images, much slower"
        )
    import torch
    from nvidia import dali

    places = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    for place in places:
        _decode(place)
    return Finding(
        "ok", f"{dali.__version__}, decoded an image on the {' and the '.join(map(str.upper, places))}"
    )


def _decode(place: str) -> None:
    import numpy as np
    from nvidia.dali import fn, pipeline_def
    from PIL import Image

    jpeg = io.BytesIO()
    Image.new("RGB", (24, 16), (200, 30, 30)).save(jpeg, "JPEG")
    data = np.frombuffer(jpeg.getvalue(), np.uint8)
    device = {"cpu": "cpu", "gpu": "mixed"}[place]

    @pipeline_def(batch_size=1, num_threads=1, device_id=0 if place == "gpu" else None)
    def graph():
        return fn.decoders.image(fn.external_source(lambda: [data]), device=device)

    pipeline = graph()
    pipeline.build()
    shape = tuple(pipeline.run()[0].shape()[0])
    if shape != (16, 24, 3):
        raise RuntimeError(f"decoded an image of 16 x 24 pixels to the shape {shape}")


def apex() -> Finding:
    """NVIDIA's apex, or the stranger of the same name that `pip install apex` brings."""
    if importlib.util.find_spec("apex") is None:
        return Finding("absent", "not needed: torch and fastsuncet have what was used of it")
    # Imported nowhere else but by the code that uses a part of it, and only here to tell the two apart.
    try:
        module = importlib.import_module("apex")
    except Exception as error:  # whatever a stranger's package does when it is imported
        return Finding("absent", f"installed but not importable ({error})", "it is not used")
    if hasattr(module, "optimizers") or importlib.util.find_spec("apex.optimizers") is not None:
        return Finding("ok", "NVIDIA's")
    return Finding(
        "absent", "the package named apex here is another one, a web toolkit", "pip uninstall apex"
    )


def extras() -> Finding:
    """What only some commands and settings use."""
    wanted = {"scikit-learn": "demo", "tensorboard": "tensorboard", "wandb": "wandb"}
    there = {package: version for package in wanted if (version := installed_or_none(package))}
    missing = {package: extra for package, extra in wanted.items() if package not in there}
    facts = ", ".join(f"{package} {version}" for package, version in there.items())
    if not missing:
        return Finding("ok", facts)
    return Finding(
        "absent",
        ", ".join(missing) + (f" (installed: {facts})" if facts else ""),
        f"pip install 'fastsuncet[{','.join(missing.values())}]' for the settings that use "
        + ("it" if len(missing) == 1 else "them"),
    )


def installed_or_none(package: str) -> str | None:
    """The version of an installed package, None where it is not installed."""
    try:
        return installed(package)
    except PackageNotFoundError:
        return None


def disk() -> Finding:
    """Room for checkpoints where the command is run."""
    free = shutil.disk_usage(".").free
    text = f"{free / GIGA:,.1f} GB free in {Path.cwd()}"
    if free < DISK_NEEDED:
        return Finding(
            "problem", text, "a ResNet-50 checkpoint is 0.2 GB and four are held at times: free 1 GB"
        )
    return Finding("ok", text)


def shared_memory() -> Finding:
    """/dev/shm, which NCCL needs between the GPUs of one machine."""
    import torch

    if not os.path.isdir("/dev/shm"):
        return Finding("absent", "no /dev/shm", "needed only for several GPUs in one machine")
    size = shutil.disk_usage("/dev/shm").total
    if size < SHM_NEEDED and torch.cuda.device_count() > 1:
        return Finding("problem", f"{size / 1e6:,.0f} MB", "docker run --shm-size=1g")
    return Finding("ok", f"{size / GIGA:,.2f} GB")


def cores() -> Finding:
    """CPU cores this process may use."""
    import torch

    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = torch.cuda.device_count()
    each = f", {count / gpus:.0f} a GPU: data.decode_threads up to that" if gpus else ""
    return Finding("ok", f"{count}{each}")


Examinations = list[tuple[str, Callable[[], Finding]]]
EXAMINATIONS: Examinations = [
    ("python", python),
    ("torch", required("torch")),
    ("torchvision", required("torchvision")),
    ("timm", required("timm")),
    ("GPU", gpu),
    ("NCCL", nccl),
    ("NVRTC", nvrtc),
    ("DALI", dali),
    ("apex", apex),
    ("extras", extras),
    ("disk", disk),
    ("/dev/shm", shared_memory),
    ("cores", cores),
]
