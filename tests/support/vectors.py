"""Finds the numbered vectors computed with the authors' code, and skips with the reason where they are absent.

They are not part of the project: every subject they cover has an oracle of its own beside it, so the suite says
the same without them, with less authority.
"""

import os
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(
    os.environ.get("FASTSUNCET_VECTORS", Path(__file__).resolve().parents[3] / "shared" / "vectors")
)


def load_vectors(name: str) -> dict[str, np.ndarray]:
    """The arrays of `name`.npz, or a skip that says which file was looked for."""
    path = FOLDER / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no {path.name}: set FASTSUNCET_VECTORS to the folder that holds the authors' vectors")
    with np.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
