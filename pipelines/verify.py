"""Decode every image once with the decoder that trains, and report those that cannot be used and why.

A clean first epoch proves nothing: a truncated file can fail only once a crop reaches the missing rows, and DALI can
refuse what PIL reads. So this check goes over all files before training.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pipelines.backend import choose_backend
from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import Progress, image_size, read_headers
from pipelines.datasets.index import ImageIndex
from pipelines.find_bad_images import CUT_OFF, Decode, diagnosis, is_cut_off, readable

_BLOCK = 1024  # files between two progress reports; their pixels are then read from the disk's cache
_BATCH = 32  # images decoded at a time ...
_BATCH_PIXELS = 64_000_000  # ... fewer where they are large: 200 MB of uint8 RGB


@dataclass(frozen=True)
class CheckReport:
    """What a check found: `index` has the current sizes and bad images, for `save_index` to keep."""

    index: ImageIndex
    decoder: str  # "DALI" or "PIL"

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(path, why it cannot be used) of each bad image."""
        return [(str(self.index.path(i)), reason) for i, reason in self.index.bad.items()]


def check(
    index: ImageIndex,
    backend: str = "auto",
    *,
    device: str = "cpu",
    threads: int = 2,
    progress: Progress | None = None,
) -> CheckReport:
    """Check every image: header, at most 100 megapixels, JPEG end marker, whole decode, checksum in a pack.

    `backend` "dali" decodes with DALI on `device` ("cpu" or "gpu"), "torchvision" with PIL, "auto" with DALI where it
    is installed. `progress(done, total)` is called after each block. An image that decodes to wrong pixels without an
    error (a flipped bit inside a JPEG) is found only in a pack.

    Raises DataError for data without files, for an absent back-end, and when the decoder refuses a whole batch that PIL
    reads: then the decoder has failed, not the files. No content of a file raises.
    """
    if index.root is None:
        raise DataError("these data are held in memory: there is no file to check")
    dali = choose_backend(backend) == "dali"
    decode = _decoder(dali, device, threads)
    sizes = np.zeros((len(index), 2), np.int32)
    stamps = np.empty((len(index), 2), np.int64) if index.pack is None else None
    bad: dict[int, str] = {}
    for first in range(0, len(index), _BLOCK):
        numbers = range(first, min(first + _BLOCK, len(index)))
        if stamps is None:
            bad.update(_bad_packed(index, numbers, sizes))
        else:
            block = slice(numbers.start, numbers.stop)
            headers = read_headers(index.root, index.files[block])
            sizes[block], stamps[block] = headers.sizes, headers.stamps
            bad.update((first + row, reason) for row, reason in headers.bad.items())
        bad.update(_undecodable(index, [i for i in numbers if i not in bad], sizes, decode))
        if progress is not None:
            progress(numbers.stop, len(index))
    sizes[list(bad)] = 0
    checked = replace(index, sizes=sizes, stamps=stamps, bad=dict(sorted(bad.items())))
    return CheckReport(checked, "DALI" if dali else "PIL")


def _decoder(dali: bool, device: str, threads: int) -> Decode:
    # Imported where they are used: this module must work where DALI is absent.
    if dali:
        from pipelines.dali.engine import DaliDecoder

        return DaliDecoder(device, batch=_BATCH, threads=threads)
    from pipelines.torchvision_engine import pil_decode

    return partial(pil_decode, threads=threads)


def _bad_packed(index: ImageIndex, numbers: range, sizes: np.ndarray) -> dict[int, str]:
    """Read the sizes of packed images, and return those whose bytes or headers are bad, and why."""
    bad = {}
    for number in numbers:
        reason = index.bad.get(number) or index.damage(number)
        try:
            sizes[number] = (0, 0) if reason else image_size(index.content(number))
        except ValueError as problem:
            reason = str(problem)
        if reason:
            bad[number] = reason
    return bad


def _undecodable(index: ImageIndex, numbers: list[int], sizes: np.ndarray, decode: Decode) -> dict[int, str]:
    """Return those of `numbers` that cannot be decoded whole to the size in their header, and why."""
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
