"""One Python batch of CIFAR-10 or CIFAR-100: a pickle, read without running what it says."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.data_errors import DataError


def read_batch(path: Path, *, key: bytes, classes: int, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (n, 32, 32, 3) and labels int64 (n,) of one batch, the labels being those under `key`.

    The file is a pickle, a program that could do anything: it is run on a machine that knows nothing but
    uint8 arrays, and every other name in it is refused with DataError. So is a file of more than `largest`
    bytes, or with a label that is not below `classes`.
    """
    if path.stat().st_size > largest:
        raise DataError(f"{path} is larger than any CIFAR batch")
    try:
        batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        planes = batch[b"data"].array
        labels = np.array(batch[key])
        if planes.shape != (len(labels), 3072) or labels.dtype != np.int64 or labels.ndim != 1:
            raise ValueError(f"{planes.shape} pixels with {labels.dtype} {labels.shape} labels")
        if not 0 <= labels.min() <= labels.max() < classes:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}")
    except Exception as error:  # a damaged pickle fails in any way at all, a hostile one by _Refused
        raise DataError(f"{path} is not a CIFAR batch: {type(error).__name__}: {error}") from error
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


class _Refused(pickle.UnpicklingError):
    pass


class _Array:
    """Stands for numpy.ndarray inside a batch: takes uint8 bytes and a shape, and nothing else."""

    array: np.ndarray

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _UInt8) or fortran or not isinstance(data, bytes):
            raise _Refused("an array that is not plain bytes")
        self.array = np.frombuffer(data, np.uint8).reshape(shape)


class _UInt8:
    """Stands for numpy.dtype inside a batch: only ever uint8."""

    def __init__(self, kind: Any, *_: Any):
        if kind not in ("u1", b"u1"):
            raise _Refused(f"an array of {kind!r} instead of uint8")

    def __setstate__(self, state: tuple) -> None:
        """Byte order and alignment mean nothing for single bytes."""


def _reconstruct(*_: Any) -> _Array:
    return _Array()


# All the names a batch holds; the first one's module has moved since the batches were written.
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _UInt8,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _Refused(f"it asks for {module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("it refers to something outside the file")
