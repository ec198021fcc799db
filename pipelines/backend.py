"""Choose which of the two back-ends reads the pixels, and say how to install what is missing."""

import importlib

import torch

from pipelines.data_errors import DataError
from pipelines.output import say_once


def choose_backend(backend: str) -> str:
    """Return "dali" or "torchvision" for `backend`, "auto", "dali" or "torchvision".

    "auto" without DALI is torchvision and prints how to install DALI. Raises DataError when "dali" is asked for and
    cannot be imported, ValueError for another name.
    """
    if backend not in ("auto", "dali", "torchvision"):
        raise ValueError(f'backend must be "auto", "dali" or "torchvision", not {backend!r}')
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


def install_command() -> str:
    """Return the pip command for the DALI build that goes with this torch: there is one per CUDA generation."""
    generation = "130" if (torch.version.cuda or "").startswith("13") else "120"
    return f"pip install 'nvidia-dali-cuda{generation}>=2.2,<3'"


def require_gpu() -> None:
    """Raise DataError where no GPU can be used: shorter than what DALI and torch would say."""
    if not torch.cuda.is_available():
        raise DataError(
            "device gpu was asked for, but no NVIDIA GPU with a working driver is visible: use device cpu, "
            "or see what nvidia-smi says"
        )
