"""Show what is installed, what is missing, and what to do.

exit codes: 0 a run can start here; 1 something would stop it
"""

import importlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastsuncet.cli._parser import Options, Parser
from fastsuncet.errors import ConfigError
from fastsuncet.versions import installed
from pipelines import backend

if TYPE_CHECKING:
    from packaging.requirements import Requirement


class Finding(NamedTuple):
    """The result of an examination."""

    state: str  # "ok", "absent" or "problem"
    facts: str
    advice: str = ""


Examinations = list[tuple[str, Callable[[], Finding]]]


def run(parser: Parser, options: Options) -> int:
    # Of the two builds of DALI one is installed, never both: `dali` says which.
    extras = [name for name in _about("Provides-Extra") if not name.startswith("dali-")]
    return doctor([*EXAMINATIONS, *((name, partial(extra, name)) for name in extras)])


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


def required(name: str) -> Finding:
    """Compare a dependency with the bounds of pyproject.toml, and import it."""
    bounds = next((str(each) for each in _requirements() if each.name == name and not each.marker), name)
    version = installed(name)
    # Without a version, its files have no record of pip's: a copy, or half an uninstall.
    facts = f"{version}, tested with {bounds}" if version else "importable, but of unknown version"
    try:
        importlib.import_module(name)
    except ImportError as error:
        return Finding("problem", f"not installed ({error})", f"pip install '{bounds}'")
    from packaging.requirements import Requirement

    good = version and Requirement(bounds).specifier.contains(version, prereleases=True)
    return Finding("ok", str(version)) if good else Finding("problem", facts, f"pip install '{bounds}'")


def extra(name: str) -> Finding:
    """Look for an optional dependency; docs/install.md says what each is for."""
    wanted = [each for each in _requirements() if each.marker and "extra" in str(each.marker)]
    wanted = [each for each in wanted if each.marker.evaluate({"extra": name}) and each.name != "fastsuncet"]
    found = {each: installed(each.name) for each in wanted}
    if missing := [f"'{each.name}{each.specifier}'" for each, version in found.items() if not version]:
        return Finding("absent", f"pip install {' '.join(missing)}")
    return Finding("ok", ", ".join(f"{each.name} {version}" for each, version in found.items()))


def _requirements() -> "list[Requirement]":
    from packaging.requirements import Requirement

    return list(map(Requirement, _about("Requires-Dist")))


def _about(field: str) -> list[str]:
    """Return the lines of a field of this package's metadata, none in a checkout that was not installed."""
    try:
        return metadata("fastsuncet").get_all(field) or []
    except PackageNotFoundError:
        return []


def cards() -> Finding:
    """Find the GPUs that torch can use, or the reason why it can use none."""
    import torch
    from torch.cuda import nccl

    from fastsuncet.distributed.place import pick_device

    try:
        # The file of a driver is seen in a container too, whose GPUs are asked for.
        wanted = "cuda" if os.path.exists("/proc/driver/nvidia/version") else "auto"
        if pick_device(wanted, 0).type == "cpu":
            facts = f"torch (CUDA {torch.version.cuda}) finds none"
            return Finding("absent", facts, "training runs on the CPU")
    except ConfigError as error:
        return Finding("problem", str(error))
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    kinds = sorted({f"{c.name}, {c.total_memory / 1e9:.0f} GB, {c.major}.{c.minor}" for c in found})
    library = "NCCL {}.{}.{}".format(*nccl.version()) if torch.distributed.is_nccl_available() else "no NCCL"
    return Finding("ok", f"{len(found)} x {'; '.join(kinds)} (CUDA {torch.version.cuda}, {library})")


def nvrtc() -> Finding:
    """Look for the run-time compiler of CUDA sources."""
    from pipelines.cuda_compiler import unavailable, version

    if (problem := unavailable()) is not None:
        return Finding(
            "absent", problem.splitlines()[0], "needed only on a GPU: PyTorch's kernels are used instead"
        )
    return Finding("ok", "{}.{}".format(*version()))


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
        pipeline.run()
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

    from fastsuncet.tuning.fast_paths import PATHS

    if not torch.cuda.is_available():
        return Finding("absent", "PyTorch's operators, as on any CPU")
    missing = {name: path.missing() for name, path in PATHS.items()}
    tried = ", ".join(name for name, reason in missing.items() if reason is None)
    notes = "; ".join(f"not {name}: {reason}" for name, reason in missing.items() if reason)
    return Finding("ok", f"a run tries {tried} (docs/speed.md)", notes)


def disk() -> Finding:
    """Look for disk space for checkpoints in the current folder."""
    free = shutil.disk_usage(".").free / 1e9
    facts = f"{free:,.1f} GB free in {Path.cwd()}"
    advice = "free 1 GB: a ResNet-50 checkpoint is 0.2 GB and up to four are kept"
    return Finding("problem", facts, advice) if free < 1 else Finding("ok", facts)


def shared_memory() -> Finding:
    """Look at the size of /dev/shm, which NCCL needs between the GPUs of one machine."""
    import torch

    total = shutil.disk_usage("/dev/shm").total / 1e9 if os.path.isdir("/dev/shm") else 0
    size = f"{total:,.2f} GB"
    # Docker's default of 64 MB is too little.
    too_small = total < 0.25 and torch.cuda.device_count() > 1
    return Finding("problem", size, "docker run --shm-size=1g") if too_small else Finding("ok", size)


def cores() -> Finding:
    """Count the CPU cores that this process can use."""
    import torch

    count, gpus = backend.cores(), torch.cuda.device_count()
    return Finding("ok", f"{count}, {count / gpus:.0f} a GPU" if gpus else f"{count}")


EXAMINATIONS: Examinations = [
    ("python", python),
    *((name, partial(required, name)) for name in ("torch", "torchvision", "timm", "pydantic")),
    ("GPU", cards),
    ("NVRTC", nvrtc),
    ("DALI", dali),
    ("views", view_operator),
    ("fast paths", fast_paths),
    ("disk", disk),
    ("/dev/shm", shared_memory),
    ("cores", cores),
]
