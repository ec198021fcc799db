"""Decodes every image once with the decoder that trains, and says which cannot be used and why.

A clean first epoch proves nothing: a truncated file may fail only once a crop reaches what is missing, and what
PIL reads DALI may not. So this is a run of its own over all files, before training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipelines.backend import choose_backend
from pipelines.errors import DataError
from pipelines.headers import MAX_PIXELS, Progress, in_threads, read_headers
from pipelines.index import ImageIndex
from pipelines.probe import CUT_OFF, diagnosis, is_cut_off, readable

_BLOCK = 1024  # files between two reports; their headers are read, then their pixels from the disk's cache
_BATCH = 32  # images decoded at a time ...
_BATCH_PIXELS = 64_000_000  # ... fewer where they are large: 200 MB of uint8 RGB

# Of each file (height, width) as decoded, or the error: decoding never raises.
Decode = Callable[[Sequence[Path]], list[tuple[int, int] | Exception]]


@dataclass(frozen=True)
class CheckReport:
    """What a check found: `index` has the sizes and the bad images of now, for `save_index` to keep."""

    index: ImageIndex
    decoder: str  # "DALI" or "PIL"

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(path, why it cannot be used) of each bad image."""
        return [(str(self.index.path(i)), reason) for i, reason in self.index.bad.items()]

    def __str__(self) -> str:
        lines = [f"{path}: {reason}" for path, reason in self.bad]
        found = f"{len(lines)} cannot be used" if lines else "all of them good"
        return "\n".join([*lines, f"{len(self.index)} images checked with {self.decoder}: {found}"])


def check(
    index: ImageIndex,
    backend: str = "auto",
    *,
    device: str = "cpu",
    device_id: int = 0,
    threads: int = 2,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
) -> CheckReport:
    """Looks at every image: header, no more than `max_pixels`, a JPEG's end marker, and a whole decode.

    `backend` "dali" decodes with DALI, "torchvision" with PIL, "auto" with DALI where it is installed; `device`
    "gpu" on that GPU: each as training does. `progress(done, all)` follows. What decodes without complaint to
    wrong pixels (a flipped bit inside a JPEG) is not found.

    Raises DataError for data without files, for a back-end that is not there, and when the decoder refuses a
    whole batch that PIL reads: then nobody should throw files away. No other file, whatever is in it, ends it.
    """
    if index.root is None:
        raise DataError("these data are held in memory: there is no file to check")
    dali = choose_backend(backend) == "dali"
    decode = _WithDali(device, device_id, threads) if dali else _with_pil(threads)
    sizes, stamps = np.zeros((len(index), 2), np.int32), np.empty((len(index), 2), np.int64)
    bad: dict[int, str] = {}
    for first in range(0, len(index), _BLOCK):
        numbers = range(first, min(first + _BLOCK, len(index)))
        block = slice(numbers.start, numbers.stop)
        headers = read_headers(index.root, index.files[block], max_pixels=max_pixels)
        sizes[block], stamps[block] = headers.sizes, headers.stamps
        bad.update((first + row, reason) for row, reason in headers.bad.items())
        bad.update(_undecodable(index, [i for i in numbers if i not in bad], sizes, decode))
        if progress is not None:
            progress(numbers.stop, len(index))
    sizes[list(bad)] = 0
    checked = replace(index, sizes=sizes, stamps=stamps, bad=dict(sorted(bad.items())))
    return CheckReport(checked, "DALI" if dali else "PIL")


def _undecodable(index: ImageIndex, numbers: list[int], sizes: np.ndarray, decode: Decode) -> dict[int, str]:
    """Which of `numbers` cannot be decoded whole to the size in their header, and why."""
    bad = {}
    for batch in _batches(numbers, sizes):
        paths = [index.path(i) for i in batch]
        outcomes = decode(paths)
        refused = [path for path, outcome in zip(paths, outcomes) if isinstance(outcome, Exception)]
        if len(refused) == _BATCH and all(map(readable, refused)):
            raise DataError(
                f"the decoder refuses {len(refused)} files in a row that PIL reads, the first {refused[0]}: the "
                f"decoder or its device has failed, or does not know this kind of file ({outcomes[0]})"
            )
        for i, path, outcome in zip(batch, paths, outcomes):
            if isinstance(outcome, Exception):
                bad[i] = diagnosis(path, outcome)
            elif outcome != tuple(sizes[i]):
                (height, width), (h, w) = outcome, sizes[i]
                bad[i] = f"decodes to {width} x {height} pixels, but its header says {w} x {h}"
            elif is_cut_off(path):
                bad[i] = CUT_OFF
    return bad


def _batches(numbers: list[int], sizes: np.ndarray) -> Iterator[list[int]]:
    batch, pixels = [], 0
    for i in numbers:
        more = int(sizes[i, 0]) * int(sizes[i, 1])
        if batch and (len(batch) == _BATCH or pixels + more > _BATCH_PIXELS):
            yield batch
            batch, pixels = [], 0
        batch.append(i)
        pixels += more
    if batch:
        yield batch


def _with_pil(threads: int) -> Decode:
    from pipelines.torchvision_twin import pil_decode

    def decode(paths: Sequence[Path]) -> list[tuple[int, int] | Exception]:
        outcomes: list = [None] * len(paths)

        def work(row: int) -> None:
            outcomes[row] = _outcome(pil_decode, paths[row])

        in_threads(work, len(paths), threads)
        return outcomes

    return decode


class _WithDali:
    """Batches through one pipeline; after a failure, which kills it, file by file to find the culprits."""

    def __init__(self, device: str, device_id: int, threads: int):
        from pipelines import dali_engine, graphs

        self._encoded = dali_engine.encoded_path
        self._one = dali_engine.DaliDecoder(device, device_id)
        self._build = lambda: graphs.decoded(
            lambda: self._paths,
            batch_size=_BATCH,
            num_threads=threads,
            prefetch_queue_depth=1,
            **dali_engine.placement(device, device_id),
        )
        self._paths, self._pipeline = [], None

    def __call__(self, paths: Sequence[Path]) -> list[tuple[int, int] | Exception]:
        self._paths = [self._encoded(path) for path in paths]
        if self._pipeline is None:
            self._pipeline = self._build()
        try:
            (images,) = self._pipeline.run()
        except RuntimeError:
            self._pipeline = None
            return [_outcome(self._one, path) for path in paths]
        return [tuple(shape[:2]) for shape in images.shape()]


def _outcome(decode: Callable[[Path], tuple[int, int]], path: Path) -> tuple[int, int] | Exception:
    try:
        return decode(path)
    except Exception as error:  # whatever a damaged file does to a decoder is that file's reason
        return error
