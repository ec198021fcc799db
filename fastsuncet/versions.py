"""Which versions and sources run. DALI is not imported for it, which takes a second."""

import functools
import hashlib
import platform
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"
DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")  # two builds of one Python package: one is installed


def installed(package: str) -> str | None:
    """Return the version of the package of that distribution name, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dali() -> str | None:
    """Return the version of DALI, of either build, None if it is not installed."""
    return installed(DALI[0]) or installed(DALI[1])


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the version of every package that decides results, None for one that is not installed. Imports torch."""
    import torch

    return {
        "fastsuncet": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "torchvision": installed("torchvision"),
        "timm": installed("timm"),
        "dali": dali(),
        "numpy": installed("numpy"),
    }


@functools.cache
def digest_of_sources() -> str:
    """Return the sha256 of this program's sources, kernels included, as they were at the first call."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for folder in ("fastsuncet", "pipelines"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".cc", ".h"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def drawing_problem() -> str:
    """Return the sentence on what to install for pictures, "" where matplotlib is installed."""
    return "" if installed("matplotlib") else "pictures need matplotlib: pip install matplotlib"
