"""Load the numbers computed with the authors' code; skip with the reason where they are absent.

They are not part of the project. Every subject they cover also has an independent oracle in the tests.
"""

import os
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(
    os.environ.get("FASTSUNCET_VECTORS", Path(__file__).resolve().parents[3] / "shared" / "vectors")
)


def load_vectors(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of `name`.npz, or skip and name the missing file."""
    path = FOLDER / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no {path.name}: set FASTSUNCET_VECTORS to the folder that holds the authors' vectors")
    with np.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
