"""Show what is installed, what is missing, and what to do.

exit codes: 0 a run can start here; 1 something would stop it
"""

import importlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import NamedTuple

from fastsuncet.cli._parser import Options, Parser
from fastsuncet.versions import installed
from pipelines import backend

GIGA = 1e9
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# A ResNet-50's weights and momentum are 0.2 GB, and a save holds one set more than it keeps.
DISK_NEEDED = 1 * GIGA
# NCCL passes data between the GPUs of one machine through here; Docker's default of 64 MB is too little.
SHM_NEEDED = 0.25 * GIGA
# The optional dependencies of pyproject.toml, and what each is for.
EXTRAS = {
    "dali-cu12": "images by DALI, one of the two builds: NVIDIA driver 525 or newer",
    "dali-cu13": "images by DALI, one of the two builds: NVIDIA driver 580 or newer",
    "plots": "the pictures of preview, demo, report, evaluate and finetune",
    "demo": "scikit-learn's digits",
    "tensorboard": "logging.tensorboard",
    "wandb": "logging.wandb",
    "mlflow": "logging.mlflow",
    "energy": "joules of a run's GPUs",
    "onnx": "export --to onnx",
    "parquet": "outputs that end in .parquet",
    "docs": "make docs",
    "bench": "comparisons in tools/bench",
    "dev": "make test and make lint",
}


class Finding(NamedTuple):
    """The result of an examination."""

    state: str  # "ok", "absent" or "problem"
    facts: str
    advice: str = ""


Examinations = list[tuple[str, Callable[[], Finding]]]


def run(parser: Parser, options: Options) -> int:
    return doctor(EXAMINATIONS)


def doctor(examinations: Examinations) -> int:
    """Examine this machine, print the page line by line; return the exit code, 1 if something would stop a run."""
    problems = []
    for name, look in examinations:
        try:
            finding = look()
        except Exception as error:  # the page must be finished, whatever is broken about a package
            words = " ".join(str(error).split())[:200]
            finding = Finding("problem", f"{type(error).__name__}: {words}", "install it again")
        print(f"{name:<12} {finding.state:<8} {finding.facts}")
        if finding.advice:
            print(f"{'':<21} -> {finding.advice}")
        if finding.state == "problem":
            problems.append(name)
    print()
    if problems:
        print(f"{', '.join(problems)}: follow the advice above; a run would fail there.")
        return 1
    print("`fastsuncet train` can run here. What is absent is not needed, or is replaced by something else.")
    return 0


def python() -> Finding:
    """Compare the interpreter with the versions that the project is tested with."""
    good = (3, 10) <= sys.version_info[:2] <= (3, 13)
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("ok", version) if good else Finding("problem", version, "use Python 3.10 to 3.13")


def required(name: str) -> Callable[[], Finding]:
    """Return the examination of a dependency: importable, and within the bounds of pyproject.toml."""

    def look() -> Finding:
        from packaging.requirements import Requirement

        lines = (line for line in _requirements() if re.match(rf"{name}\b[^;]*$", line, re.I))
        wanted, version = next(lines, name), installed(name)
        # Without a version, its files have no record of pip's: a copy, or half an uninstall.
        facts = f"{version}, tested with {wanted}" if version else "importable, but of unknown version"
        try:
            importlib.import_module(name)
            if version and Requirement(wanted).specifier.contains(version, prereleases=True):
                return Finding("ok", version)
        except ImportError as error:
            facts = f"not installed ({error})"
        return Finding("problem", facts, f"pip install '{wanted}'")

    return look


def _requirements() -> list[str]:
    """Return the requirements of pyproject.toml, without spaces: "torch>=2.6,<3", 'onnx>=1.17;extra=="onnx"'."""
    try:
        lines = requires("fastsuncet") or []
    except PackageNotFoundError:
        lines = _requirements_of_checkout()
    return [re.sub(r"\s", "", line) for line in lines]


def _requirements_of_checkout() -> list[str]:
    """Return the requirements of a checkout that was not installed; none with Python 3.10, which reads no TOML."""
    if sys.version_info < (3, 11) or not PYPROJECT.exists():
        return []
    import tomllib

    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    return project["dependencies"] + [f"{line};extra=='{name}'" for name, lines in extras for line in lines]


def cards() -> Finding:
    """Find the GPUs that torch can use, or the reason why it can use none."""
    import torch

    from fastsuncet.distributed.place import code_problem

    driver, cuda = Path("/proc/driver/nvidia/version"), torch.version.cuda
    if torch.cuda.is_available():
        numbers = range(torch.cuda.device_count())
        if problem := next(filter(None, map(code_problem, numbers)), None):
            return Finding("problem", problem, "install a torch for this GPU, or set meta.device=cpu")
        found = [torch.cuda.get_device_properties(i) for i in numbers]
        kinds = sorted({f"{c.name}, {c.total_memory / 1e9:.0f} GB, {c.major}.{c.minor}" for c in found})
        return Finding("ok", f"{len(found)} x {'; '.join(kinds)} (CUDA {cuda})")
    if cuda is None:
        return Finding("absent", "this torch is built without CUDA", "training runs on the CPU")
    if driver.exists():
        line = driver.read_text(encoding="utf-8").splitlines()[0]
        facts = f"there is a driver, but torch (CUDA {cuda}) cannot use it: {line}"
        return Finding("problem", facts, "update the driver; start a container with --gpus all")
    return Finding("absent", f"no NVIDIA driver (torch is built for CUDA {cuda})", "training runs on the CPU")


def nccl() -> Finding:
    """Find the library that GPUs communicate with."""
    import torch

    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        advice = "needed only for several GPUs; processes on CPUs use gloo"
        return Finding("absent", "this torch has no NCCL", advice)
    from torch.cuda.nccl import version

    return Finding("ok", ".".join(map(str, version())))


def nvrtc() -> Finding:
    """Try the run-time compiler of CUDA sources on a small kernel."""
    import torch

    from pipelines.cuda_compiler import KernelError, compile_cuda, version

    if torch.version.cuda is None:
        return Finding("absent", "this torch is built without CUDA", "needed only on a GPU")
    source = b'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }'
    try:
        major, minor = version()
        compile_cuda("doctor.cu", source, {}, "compute_80", ())
    except KernelError as error:
        return Finding("absent", str(error).splitlines()[0], "PyTorch's kernels are used instead")
    return Finding("ok", f"{major}.{minor}, compiled a kernel")


def dali() -> Finding:
    """Try DALI on a small JPEG: on the CPU, and on the GPU if there is one."""
    from pipelines.backend import dali_problem, install_command

    problem = dali_problem()
    if problem is not None:
        advice = f"{install_command()}; until then torchvision reads the images, much slower"
        return Finding("absent", problem, advice)
    import numpy as np
    import torch
    from nvidia import dali
    from PIL import Image

    jpeg = io.BytesIO()
    Image.new("RGB", (24, 16), (200, 30, 30)).save(jpeg, "JPEG")
    data = np.frombuffer(jpeg.getvalue(), np.uint8)
    devices = {"CPU": (None, "cpu"), **({"GPU": (0, "mixed")} if torch.cuda.is_available() else {})}
    for number, decoder in devices.values():
        # DALI's stub knows no pipeline without a GPU.
        with dali.Pipeline(1, 1, number) as pipeline:  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]
            encoded = dali.fn.external_source(lambda: [data])
            pipeline.set_outputs(dali.fn.decoders.image(encoded, device=decoder))
        pipeline.build()
        shape = tuple(pipeline.run()[0].shape()[0])
        if shape != (16, 24, 3):
            raise RuntimeError(f"decoded an image of 16 x 24 pixels to the shape {shape}")
    return Finding("ok", f"{dali.__version__}, decoded an image on the {' and the '.join(devices)}")


def view_operator() -> Finding:
    """Look for the compiled operator of the views."""
    from pipelines.backend import dali_problem

    if dali_problem() is not None:
        return Finding("absent", "needs DALI")
    from pipelines.dali.view_operator.build import kept

    if (path := kept()) is not None:
        return Finding("ok", f"compiled: {path}")
    advice = "fastsuncet build; a first run does it too, where there is a C++ compiler"
    return Finding("absent", "not compiled: DALI's own operators make the same pixels, slower", advice)


def fast_paths() -> Finding:
    """Say which fast paths a run tries on this machine, and what it lacks for the others."""
    import torch

    from fastsuncet.tuning.paths import PATHS

    if not torch.cuda.is_available():
        return Finding("absent", "PyTorch's operators, as on any CPU")
    missing = {name: path.missing() for name, path in PATHS.items()}
    tried = ", ".join(name for name, reason in missing.items() if reason is None)
    notes = "; ".join(f"not {name}: {reason}" for name, reason in missing.items() if reason)
    return Finding("ok", f"a run tries {tried} (docs/speed.md)", notes)


def extra(name: str) -> Callable[[], Finding]:
    """Return the examination of an optional dependency of pyproject.toml."""

    def look() -> Finding:
        from packaging.requirements import Requirement

        lines = [Requirement(line) for line in _requirements() if re.search(rf"extra==.{name}\b.$", line)]
        found = {each: installed(each.name) for each in lines if each.name != "fastsuncet"}
        if missing := [
            f"'{each.name}{each.specifier}'" for each, version in found.items() if version is None
        ]:
            return Finding("absent", f"for {EXTRAS[name]}: pip install {' '.join(missing)}")
        versions = ", ".join(f"{each.name} {version}" for each, version in found.items())
        return Finding("ok" if found else "absent", f"for {EXTRAS[name]}: {versions or 'see pyproject.toml'}")

    return look


def disk() -> Finding:
    """Look for disk space for checkpoints in the current folder."""
    free = shutil.disk_usage(".").free
    facts = f"{free / GIGA:,.1f} GB free in {Path.cwd()}"
    advice = "free 1 GB: a ResNet-50 checkpoint is 0.2 GB and up to four are kept"
    return Finding("problem", facts, advice) if free < DISK_NEEDED else Finding("ok", facts)


def shared_memory() -> Finding:
    """Look at the size of /dev/shm, which NCCL needs between the GPUs of one machine."""
    import torch

    if not os.path.isdir("/dev/shm"):
        return Finding("absent", "no /dev/shm", "needed only for several GPUs in one machine")
    size = shutil.disk_usage("/dev/shm").total
    if size < SHM_NEEDED and torch.cuda.device_count() > 1:
        return Finding("problem", f"{size / 1e6:,.0f} MB", "docker run --shm-size=1g")
    return Finding("ok", f"{size / GIGA:,.2f} GB")


def cores() -> Finding:
    """Count the CPU cores that this process can use."""
    import torch

    count, gpus = backend.cores(), torch.cuda.device_count()
    return Finding("ok", f"{count}, {count / gpus:.0f} a GPU" if gpus else f"{count}")


EXAMINATIONS: Examinations = [
    ("python", python),
    *((name, required(name)) for name in ("torch", "torchvision", "timm", "pydantic")),
    ("GPU", cards),
    ("NCCL", nccl),
    ("NVRTC", nvrtc),
    ("DALI", dali),
    ("views", view_operator),
    ("fast paths", fast_paths),
    ("disk", disk),
    ("/dev/shm", shared_memory),
    ("cores", cores),
    *((name, extra(name)) for name in EXTRAS),
]
