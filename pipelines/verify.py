"""Find the images that cannot be used, and say why: all files before training, or those of a step that failed.

A clean first epoch proves nothing: a truncated file can fail only once a crop reaches the missing rows, and DALI can
refuse what PIL reads, often without naming the file. So `check` decodes every image once, with the decoder that trains.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from pipelines.backend import Backend, choose_backend
from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import Progress, file_stamps, image_size, read_rgb, read_sizes
from pipelines.datasets.index import ImageIndex

_CUT_OFF = "a truncated JPEG: its end is missing"
# The kinds of a JPEG's segments: all but those without a length, and the pixels.
_SEGMENTS = {*range(0xC0, 0xD0), *range(0xDB, 0xFF)}
_BLOCK = 1024  # files between two progress reports; their pixels are then read from the disk's cache
_BATCH = 32  # images decoded at a time ...
_BATCH_PIXELS = 64_000_000  # ... fewer where they are large: 200 MB of uint8 RGB

# Gives, for each file or packed content, (height, width) as decoded, or the error. It must decode as training does.
Decode = Callable[[Sequence[Path | bytes]], list[tuple[int, int] | Exception]]


def check(
    index: ImageIndex,
    backend: Backend = "auto",
    *,
    device: Literal["cpu", "gpu"] = "cpu",
    threads: int = 2,
    progress: Progress | None = None,
) -> ImageIndex:
    """Check every image: header, at most 100 megapixels, JPEG end marker, whole decode, checksum in a pack.

    The result has the current sizes and bad images, for `save_index` to keep.

    `backend` "dali" decodes with DALI on `device` ("cpu" or "gpu"), "torchvision" with PIL, "auto" with DALI where it
    is installed. `progress(done, total)` is called after each block. An image that decodes to wrong pixels without an
    error (a flipped bit inside a JPEG) is found only in a pack.

    Raises DataError for data without files, for an absent back-end, and when the decoder refuses a whole batch that PIL
    reads: then the decoder has failed, not the files. No content of a file raises.
    """
    if index.root is None:
        raise DataError("these data are held in memory: there is no file to check")
    decode = _decoder(choose_backend(backend) == "dali", device, threads)
    sizes = np.zeros((len(index), 2), np.int32)
    stamps = np.empty((len(index), 2), np.int64) if index.pack is None else None
    bad: dict[int, str] = {}
    for first in range(0, len(index), _BLOCK):
        block = slice(first, first + _BLOCK)
        numbers = range(len(index))[block]
        if stamps is not None:
            stamps[block] = file_stamps(index.root, index.files[block])
        sizes[block], unusable = read_sizes(lambda row, first=first: _size(index, first + row), len(numbers))
        bad.update((first + row, reason) for row, reason in unusable.items())
        bad.update(_undecodable(index, [i for i in numbers if i not in bad], sizes, decode))
        if progress is not None:
            progress(numbers.stop, len(index))
    sizes[list(bad)] = 0
    return replace(index, sizes=sizes, stamps=stamps, bad=dict(sorted(bad.items())))


def find_bad_images(index: ImageIndex, indices: Iterable[int], decode: Decode) -> dict[int, str]:
    """Return the images among `indices` that training cannot use: index -> reason, in the order given.

    An image that decodes to wrong pixels without an error (a flipped bit inside a JPEG) is not found.
    """
    distinct = list(dict.fromkeys(map(int, indices)))
    found, refused = {}, []
    for i in distinct:
        if (damage := index.damage(i)) is not None:
            found[i] = damage
            continue
        image, (height, width) = index.content(i), index.sizes[i].tolist()
        (outcome,) = decode([image])
        if isinstance(outcome, Exception):
            refused.append(image)
            found[i] = _diagnosis(image, outcome)
        elif not _same_size(index, outcome, (height, width)):
            now = f"is {outcome[1]} x {outcome[0]} now"
            found[i] = f"{now}, in the index {width} x {height}: make the index again"
        elif (length := index.length_now(i)) is not None:
            found[i] = f"has {length:,} bytes now, other than in the index: make the index again"
    if len(refused) == len(distinct) > 1 and all(map(_readable, refused)):
        # A GPU that has failed refuses every file. Nobody should delete a good data set because of that.
        return {}
    return found


def _decoder(dali: bool, device: str, threads: int) -> Decode:
    # Imported where they are used: this module must work where DALI is absent.
    if dali:
        from pipelines.dali.engine import DaliDecoder

        return DaliDecoder(device, batch=_BATCH, threads=threads)
    from pipelines.torchvision_engine import pil_decode

    return partial(pil_decode, threads=threads)


def _size(index: ImageIndex, i: int) -> tuple[int, int]:
    # What was bad when it was packed has no bytes in the pack. Any other image can have been repaired since the index
    # was made, or refused by another decoder.
    absent = index.pack is not None and not index.pack.members["length"][i]
    if reason := (index.bad.get(i) if absent else index.damage(i)):
        raise ValueError(reason)
    return image_size(index.content(i), upright=index.upright)


def _undecodable(index: ImageIndex, numbers: list[int], sizes: np.ndarray, decode: Decode) -> dict[int, str]:
    """Return those of `numbers` that cannot be decoded whole to the size in their header, and why."""
    bad, row = {}, []
    for batch in _batches(numbers, sizes):
        images = [index.content(i) for i in batch]
        outcomes = decode(images)
        # Over batches: those of large images hold few.
        row = (row + batch)[-_BATCH:] if all(isinstance(outcome, Exception) for outcome in outcomes) else []
        if len(row) == min(_BATCH, len(numbers)) > 1 and all(_readable(index.content(i)) for i in row):
            raise DataError(
                f"the decoder refuses {len(row)} files in a row that PIL reads, the first {index.path(row[0])}: "
                f"the decoder or its device has failed, or does not know this kind of file ({outcomes[0]})"
            )
        for i, image, outcome in zip(batch, images, outcomes):
            if isinstance(outcome, Exception):
                bad[i] = _diagnosis(image, outcome)
            elif not _same_size(index, outcome, tuple(sizes[i])):
                (height, width), (h, w) = outcome, sizes[i]
                bad[i] = f"decodes to {width} x {height} pixels, but its header says {w} x {h}"
            elif _is_cut_off(image):
                bad[i] = _CUT_OFF
    return bad


def _same_size(index: ImageIndex, decoded: tuple[int, int], size: tuple[int, int]) -> bool:
    """Return whether an image decodes to its size in the index; it is decoded as stored, so it can lie on a side."""
    return decoded == tuple(size) or (index.upright and decoded[::-1] == tuple(size))


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


def _readable(image: Path | bytes) -> bool:
    try:
        read_rgb(image)
    except RuntimeError:
        return False
    return True


def _diagnosis(image: Path | bytes, error: Exception) -> str:
    """Return the plainest true sentence about a file that the decoder refused with `error`."""
    try:
        image_size(image)
        if _is_cut_off(image):
            return _CUT_OFF
    except ValueError as problem:  # absent, empty, no image, a GIF, too many pixels
        return str(problem)
    except OSError as problem:
        return f"cannot be read: {problem.strerror or problem}"
    # The line that names the cause: DALI's errors begin with a traceback of the graph's definition.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "ailed" in line or "ailure" in line]
    return f"damaged: {(telling or lines or [type(error).__name__])[-1]}"


def _is_cut_off(image: Path | bytes) -> bool:
    """Return whether a JPEG lacks its end marker, which a lenient decoder can forgive; pixels never contain one.

    Whatever follows the marker is ignored (a phone appends a film of megabytes), and so are the segments before the
    pixels: a thumbnail among them has an end marker of its own.
    """
    with io.BytesIO(image) if isinstance(image, bytes) else open(image, "rb") as stream:
        if stream.read(2) != b"\xff\xd8":
            return False
        # FF, the kind, two bytes of length with themselves, the content.
        while len(head := stream.read(4)) == 4 and head[0] == 0xFF and head[1] in _SEGMENTS:
            stream.seek(int.from_bytes(head[2:], "big") - 2, os.SEEK_CUR)
        return b"\xff\xd9" not in stream.read()
