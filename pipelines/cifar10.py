"""CIFAR-10: the authors' Python batches, downloaded and verified or pointed at, or its images in folders."""

import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.datasets import image_folder
from pipelines.download import download as fetch
from pipelines.download import sha256_of
from pipelines.errors import DataError
from pipelines.headers import Progress
from pipelines.index import ImageIndex
from pipelines.resident import resident as hold

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
# The authors publish the md5 c58f30108f718f92721af3b95e74349a; this is the sha256 of that same archive.
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
SIZE = 170_498_071
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_LARGEST = 64 << 20  # bytes; a batch has 31 MB


def cifar10(
    root: str | Path,
    *,
    train: bool = True,
    download: bool = False,
    resident: bool = True,
    progress: Progress | None = None,
) -> ImageIndex:
    """The 50,000 training or 10,000 test images, 32 x 32, from what lies under `root`.

    Python batches (in `root` or in its cifar-10-batches-py) come first, in the authors' order, always in
    memory. Then folders of images, `root`/train/CLASS/... and `root`/test/CLASS/..., in order of their paths:
    decoded into memory, or with `resident=False` left as files. Then the archive, whose sha256 is verified,
    which with `download` is fetched. Raises DataError, for an empty `root` with what it could hold.
    """
    root = Path(root).expanduser()
    names = TRAIN if train else TEST
    for folder in (root, root / FOLDER):
        if (folder / names[0]).is_file():
            return _from_batches(folder, names)
    images = root / ("train" if train else "test")
    if images.is_dir():
        index = image_folder(images, progress=progress)
        if index.classes != CLASSES:
            raise DataError(
                f"{images} has other class folders than CIFAR-10: {', '.join(index.classes[:12])}"
            )
        return hold(index, progress=progress) if resident else index
    archive = root / ARCHIVE
    if download and not archive.exists():
        fetch(URL, archive, sha256=SHA256, size=SIZE, progress=progress)
    if not archive.exists():
        raise DataError(
            f"no CIFAR-10 under {root}: neither {FOLDER}/ nor train/CLASS/ and test/CLASS/ nor {ARCHIVE}; "
            f"set data.root to where it is, or data.download to true"
        )
    unpack(archive, root / FOLDER)
    return _from_batches(root / FOLDER, names)


def unpack(archive: Path, folder: Path) -> None:
    """Writes the six batches out of the archive. Raises DataError for any archive but the authors' own."""
    digest = sha256_of(archive)
    if digest != SHA256:
        raise DataError(f"{archive} is not CIFAR-10's archive: sha256 {digest}, not {SHA256}; delete it")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{FOLDER}/{name}": name for name in (*TRAIN, *TEST)}
    # Members are read by name and written by us under names of ours: no path out of an archive is ever used.
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name not in wanted or not member.isfile() or member.size > _LARGEST:
                continue
            partial = folder / f".{wanted[member.name]}.{os.getpid()}.part"
            partial.write_bytes(tar.extractfile(member).read())
            os.replace(partial, folder / wanted.pop(member.name))
    if wanted:
        raise DataError(f"{archive} lacks {', '.join(wanted)}")


def _from_batches(folder: Path, names: tuple[str, ...]) -> ImageIndex:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}: unpack {ARCHIVE} again")
    batches = [read_batch(folder / name) for name in names]
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    part = "train" if names is TRAIN else "test"
    return ImageIndex(
        root=None,
        files=[f"{part}/{i:05d}" for i in range(len(labels))],
        labels=labels,
        classes=CLASSES,
        sizes=np.full((len(labels), 2), 32, np.int32),
        pixels=pixels,
    )


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (n, 32, 32, 3) and labels int64 (n,) of one Python batch.

    The file is a pickle, a program that could do anything: it is run on a machine that knows nothing but
    uint8 arrays, and every other name in it is refused with DataError.
    """
    if path.stat().st_size > _LARGEST:
        raise DataError(f"{path} is larger than any CIFAR-10 batch")
    try:
        batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        planes = batch[b"data"].array
        labels = np.array(batch[b"labels"])
        if planes.shape != (len(labels), 3072) or labels.dtype != np.int64 or labels.ndim != 1:
            raise ValueError(f"{planes.shape} pixels with {labels.dtype} {labels.shape} labels")
        if not 0 <= labels.min() <= labels.max() < 10:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}")
    except Exception as error:  # a damaged pickle fails in any way at all, a hostile one by _Refused
        raise DataError(f"{path} is not a CIFAR-10 batch: {type(error).__name__}: {error}") from error
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
