"""Sizes of image files from their headers, many files at a time, without decoding a pixel."""

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image

# Otherwise PIL would load its parsers later, in the worker threads.
Image.init()
EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"))
# What the decoders read. PIL's forty other parsers are kept away from files that a stranger made.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
MAX_PIXELS = 100_000_000
# More than cores: on a network disk a header is nearly all waiting.
THREADS = 16
# Files per task: a future for each file would cost more than the file.
_CHUNK = 256

# Called in the caller's own thread with (files done, files in all).
Progress = Callable[[int, int], None]


class Headers(NamedTuple):
    """What the headers of n files say, row by row."""

    # int32 (n, 2): height and width as stored, before any EXIF rotation; 0, 0 where unknown.
    sizes: np.ndarray
    # int64 (n, 2): bytes, and modification time in ns; -1, -1 where there is no file.
    stamps: np.ndarray
    bad: dict[int, str]  # row -> why the image cannot be used


def _readable_by_pil(image: os.PathLike | str | bytes) -> os.PathLike | str | io.BytesIO:
    return io.BytesIO(image) if isinstance(image, bytes) else image


def read_rgb(file: os.PathLike | bytes) -> np.ndarray:
    """Return an image file, or its content, as (H, W, 3) uint8 RGB, EXIF orientation ignored, 16 bits scaled to 8.

    Raises RuntimeError, from PIL's error, when it cannot be decoded.
    """
    try:
        with Image.open(_readable_by_pil(file), formats=FORMATS) as image:
            # 16-bit gray, which PIL would clip to white; older versions call such a PNG "I".
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
                gray = (np.asarray(image, np.uint32) + 128) // 257  # rounded, as DALI does
                return np.repeat(gray.astype(np.uint8)[..., None], 3, axis=2)
            return np.array(image.convert("RGB"))
    except Exception as error:  # PIL's parsers raise OSError, SyntaxError, ValueError, struct.error, ...
        name = "a packed image" if isinstance(file, bytes) else file
        raise RuntimeError(f"{name}: {error}") from error


def image_size(file: os.PathLike | str | bytes) -> tuple[int, int]:
    """Return (height, width) from the header. Raises ValueError with the reason why the image cannot be used.

    MAX_PIXELS keeps out decompression bombs: a 20000 x 20000 JPEG of 1 MB takes 4.5 GB to decode.
    """
    too_many = f"more than {MAX_PIXELS / 1e6:g} megapixels"
    try:
        # GIF is recognized only to be named in the message: PIL reads it, the decoder does not.
        with Image.open(_readable_by_pil(file), formats=(*FORMATS, "GIF")) as image:
            (width, height), kind = image.size, image.format
            # PIL turns TIFFs by this tag, DALI does not.
            turned = kind == "TIFF" and image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except Image.UnidentifiedImageError:
        empty = (len(file) if isinstance(file, bytes) else os.path.getsize(file)) == 0
        raise ValueError("an empty file" if empty else "not an image: no known header") from None
    except Image.DecompressionBombError:  # PIL's own limit, 179 megapixels, comes first
        raise ValueError(too_many) from None
    except Exception as error:  # a broken header fails in as many ways as there are parsers
        raise ValueError(f"unreadable header: {type(error).__name__}: {error}") from error
    if kind == "GIF":
        raise ValueError("a GIF, which the decoder does not read: convert it to PNG or JPEG")
    if turned:
        raise ValueError("a TIFF with an orientation tag: save it upright")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, {too_many}")
    return height, width


def in_threads(work: Callable[[int], None], count: int, threads: int = THREADS) -> None:
    """Call work(row) for rows 0..count-1, in no order. Raises what a call raised."""

    def chunk(first: int) -> None:
        for row in range(first, min(first + _CHUNK, count)):
            work(row)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(chunk, range(0, count, _CHUNK)))


def read_sizes(size_of: Callable[[int], tuple[int, int]], count: int) -> tuple[np.ndarray, dict[int, str]]:
    """Return size_of(row) of all rows, int32 (count, 2), and row -> why where it raised ValueError: size 0, 0."""
    sizes, bad = np.zeros((count, 2), np.int32), {}

    def work(row: int) -> None:
        try:
            sizes[row] = size_of(row)
        except ValueError as reason:
            bad[row] = str(reason)

    in_threads(work, count)
    return sizes, dict(sorted(bad.items()))


def stamp(status: os.stat_result) -> tuple[int, int]:
    """Return the bytes and the modification time (ns) of a file; a time after the year 2262 wraps in its 64 bits."""
    return status.st_size, (status.st_mtime_ns + 2**63) % 2**64 - 2**63


def file_stamps(root: Path, names: Sequence[str]) -> np.ndarray:
    """Return the bytes and the modification time (ns) of every file, int64 (n, 2); -1, -1 where there is none."""
    stamps = np.full((len(names), 2), -1, np.int64)

    def work(row: int) -> None:
        # No file, or a folder without access: reading the header gives the reason.
        with contextlib.suppress(OSError):
            stamps[row] = stamp(os.stat(os.path.join(root, names[row])))

    in_threads(work, len(names))
    return stamps


def read_headers(root: Path, names: Sequence[str]) -> Headers:
    """Read the header of every file. A file that cannot be used is listed in `bad`; none raises."""
    # The stamps first: a file that changes while it is read is then seen as changed the next time.
    stamps = file_stamps(root, names)
    sizes, bad = read_sizes(lambda row: image_size(os.path.join(root, names[row])), len(names))
    return Headers(sizes, stamps, bad)
