"""Tar files, forged pickles and changed .npz files that tests write."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np


def tar_of(
    path: Path, *members: tuple[str, bytes], kind: int = tarfile.PAX_FORMAT, mode="w", **header
) -> Path:
    """Write a tar as WebDataset's writer does, pax format with fractions of a second; return its path."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, mode, format=kind) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1.5
            for key, value in header.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))
    return path


class Trap:
    """Pickled, this is a command; whatever unpickles it unguarded runs the command, which writes the file RAN."""

    def __reduce__(self):
        return os.system, ("touch RAN",)


def rewritten(path: Path, **changes) -> Path:
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path
