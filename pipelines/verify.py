"""Decodes every image once with the decoder that trains, and says which cannot be used and why.

A clean first epoch proves nothing: a truncated file may fail only once a crop reaches what is missing, and what
PIL reads DALI may not. So this is a run of its own over all files, before training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipelines.backend import choose_backend
from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import (
    MAX_PIXELS,
    Headers,
    Progress,
    image_size,
    in_threads,
    read_headers,
)
from pipelines.datasets.index import ImageIndex
from pipelines.find_bad_images import CUT_OFF, diagnosis, is_cut_off, readable

_BLOCK = 1024  # files between two reports; their headers are read, then their pixels from the disk's cache
_BATCH = 32  # images decoded at a time ...
_BATCH_PIXELS = 64_000_000  # ... fewer where they are large: 200 MB of uint8 RGB

# Of each file, or of what a packed one held, (height, width) as decoded, or the error: decoding never raises.
Decode = Callable[[Sequence[Path | bytes]], list[tuple[int, int] | Exception]]


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
    """Looks at every image: header, no more than `max_pixels`, a JPEG's end marker, and a whole decode; a packed one
    must first have its checksum.

    `backend` "dali" decodes with DALI, "torchvision" with PIL, "auto" with DALI where it is installed; `device`
    "gpu" on that GPU: each as training does. `progress(done, all)` follows. What decodes without complaint to
    wrong pixels (a flipped bit inside a JPEG) is not found in a file, and always in a pack.

    Raises DataError for data without files, for a back-end that is not there, and when the decoder refuses a
    whole batch that PIL reads: then nobody should throw files away. No other file, whatever is in it, ends it.
    """
    if index.root is None:
        raise DataError("these data are held in memory: there is no file to check")
    dali = choose_backend(backend) == "dali"
    packed = index.pack is not None
    decode = _WithDali(device, device_id, threads, packed) if dali else _with_pil(threads)
    sizes, stamps = np.zeros((len(index), 2), np.int32), np.empty((len(index), 2), np.int64)
    bad: dict[int, str] = {}
    for first in range(0, len(index), _BLOCK):
        numbers = range(first, min(first + _BLOCK, len(index)))
        block = slice(numbers.start, numbers.stop)
        if packed:
            headers = _packed_headers(index, numbers, max_pixels)
        else:
            headers = read_headers(index.root, index.files[block], max_pixels=max_pixels)
        sizes[block], stamps[block] = headers.sizes, headers.stamps
        bad.update((first + row, reason) for row, reason in headers.bad.items())
        bad.update(_undecodable(index, [i for i in numbers if i not in bad], sizes, decode))
        if progress is not None:
            progress(numbers.stop, len(index))
    sizes[list(bad)] = 0
    stamps = None if packed else stamps
    checked = replace(index, sizes=sizes, stamps=stamps, bad=dict(sorted(bad.items())))
    return CheckReport(checked, "DALI" if dali else "PIL")


def _packed_headers(index: ImageIndex, numbers: range, max_pixels: int) -> Headers:
    """Sizes of packed images; whose bytes are not those that were packed is bad, whatever they decode to."""
    sizes, bad = np.zeros((len(numbers), 2), np.int32), {}
    for row, number in enumerate(numbers):
        reason = index.bad.get(number) or index.damage(number)
        if reason is None:
            try:
                sizes[row] = image_size(index.content(number), max_pixels)
            except ValueError as problem:
                reason = str(problem)
        if reason is not None:
            bad[row] = reason
    return Headers(sizes, np.full((len(numbers), 2), -1), bad)


def _undecodable(index: ImageIndex, numbers: list[int], sizes: np.ndarray, decode: Decode) -> dict[int, str]:
    """Which of `numbers` cannot be decoded whole to the size in their header, and why."""
    bad = {}
    for batch in _batches(numbers, sizes):
        images = [index.content(i) for i in batch]
        outcomes = decode(images)
        refused = [image for image, outcome in zip(images, outcomes) if isinstance(outcome, Exception)]
        if len(refused) == _BATCH and all(map(readable, refused)):
            raise DataError(
                f"the decoder refuses {len(refused)} files in a row that PIL reads, the first {index.path(batch[0])}: "
                f"the decoder or its device has failed, or does not know this kind of file ({outcomes[0]})"
            )
        for i, image, outcome in zip(batch, images, outcomes):
            if isinstance(outcome, Exception):
                bad[i] = diagnosis(image, outcome)
            elif outcome != tuple(sizes[i]):
                (height, width), (h, w) = outcome, sizes[i]
                bad[i] = f"decodes to {width} x {height} pixels, but its header says {w} x {h}"
            elif is_cut_off(image):
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
    from pipelines.torchvision_engine import pil_decode

    def decode(images: Sequence[Path | bytes]) -> list[tuple[int, int] | Exception]:
        outcomes: list = [None] * len(images)

        def work(row: int) -> None:
            outcomes[row] = _outcome(pil_decode, images[row])

        in_threads(work, len(images), threads)
        return outcomes

    return decode


class _WithDali:
    """Batches through one pipeline; after a failure, which kills it, file by file to find the culprits."""

    def __init__(self, device: str, device_id: int, threads: int, packed: bool):
        from pipelines.dali import engine as dali_engine
        from pipelines.dali import graphs

        self._fed = dali_engine.fed
        self._one = dali_engine.DaliDecoder(device, device_id)
        self._build = lambda: graphs.decoded(
            lambda: self._images,
            packed=packed,
            batch_size=_BATCH,
            num_threads=threads,
            prefetch_queue_depth=1,
            **dali_engine.placement(device, device_id),
        )
        self._images, self._pipeline = [], None

    def __call__(self, images: Sequence[Path | bytes]) -> list[tuple[int, int] | Exception]:
        self._images = [self._fed(image) for image in images]
        if self._pipeline is None:
            self._pipeline = self._build()
        try:
            (decoded,) = self._pipeline.run()
        except RuntimeError:
            self._pipeline = None
            return [_outcome(self._one, image) for image in images]
        return [tuple(shape[:2]) for shape in decoded.shape()]


def _outcome(
    decode: Callable[[Path | bytes], tuple[int, int]], image: Path | bytes
) -> tuple[int, int] | Exception:
    try:
        return decode(image)
    except Exception as error:  # whatever a damaged file does to a decoder is that file's reason
        return error
