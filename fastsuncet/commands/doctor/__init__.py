"""`fastsuncet doctor`: one page on what is installed here, what is missing, and what to do about it.

Each examination looks at one thing, by using it where that is cheap: DALI decodes an image, NVRTC compiles
a kernel. "absent" is what a run does without; "problem" is what would stop one, and makes the exit code 1.
"""

import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from fastsuncet.commands.doctor.finding import Finding
from fastsuncet.commands.doctor.gpu import cards, dali, nccl, nvrtc
from fastsuncet.data import cpu_count as cpu
from fastsuncet.versions import installed

GIGA = 1e9
# A ResNet-50's weights and momentum are 0.2 GB, and a save holds one set more than it keeps.
DISK_NEEDED = 1 * GIGA
# NCCL passes data between the GPUs of one machine through here; Docker's default of 64 MB is too little.
SHM_NEEDED = 0.25 * GIGA


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
        except ImportError as error:
            return Finding("problem", f"not installed ({error})", f"pip install '{_bounds(name)}'")
        version = installed(name)
        if version is None:  # files without the record that pip leaves: a copy, or half an uninstall
            return Finding("problem", "importable, but of unknown version", f"pip install '{_bounds(name)}'")
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
    """What only some commands and settings use, and the joules of a run (nvidia-ml-py)."""
    wanted = {
        "scikit-learn": "demo",
        "tensorboard": "tensorboard",
        "wandb": "wandb",
        "nvidia-ml-py": "energy",
    }
    there = {package: version for package in wanted if (version := installed(package))}
    missing = {package: extra for package, extra in wanted.items() if package not in there}
    facts = ", ".join(f"{package} {version}" for package, version in there.items())
    if not missing:
        return Finding("ok", facts)
    return Finding(
        "absent",
        ", ".join(missing) + (f" (installed: {facts})" if facts else ""),
        f"pip install 'fastsuncet[{','.join(missing.values())}]' for what uses "
        + ("it" if len(missing) == 1 else "them"),
    )


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

    count, gpus = cpu.cores(), torch.cuda.device_count()
    return Finding("ok", f"{count}, {count / gpus:.0f} a GPU" if gpus else f"{count}")


Examinations = list[tuple[str, Callable[[], Finding]]]
EXAMINATIONS: Examinations = [
    ("python", python),
    ("torch", required("torch")),
    ("torchvision", required("torchvision")),
    ("timm", required("timm")),
    ("GPU", cards),
    ("NCCL", nccl),
    ("NVRTC", nvrtc),
    ("DALI", dali),
    ("apex", apex),
    ("extras", extras),
    ("disk", disk),
    ("/dev/shm", shared_memory),
    ("cores", cores),
]
