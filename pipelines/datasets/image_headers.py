"""Image files: sizes from their headers without decoding a pixel, pixels by PIL, and work on many at a time."""

import io
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from PIL import ExifTags, Image, ImageChops

from pipelines.data_errors import LOST
from pipelines.output import show_progress

# Otherwise PIL would load its parsers later, in the worker threads.
Image.init()
EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"))
# Images that no decoder here reads; a scan counts them.
NOT_READ = frozenset((".heic", ".heif", ".gif", ".avif"))
# What the decoders read. PIL's forty other parsers are kept away from files that a stranger made.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
MAX_PIXELS = 100_000_000
# PIL warns of an attack from its own limit on, 89 megapixels. A program that has raised it keeps its own.
Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS and max(Image.MAX_IMAGE_PIXELS, MAX_PIXELS)
# PIL prints what it thinks of damaged EXIF values and of transparent palettes. An image that cannot be read is named.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")
warnings.filterwarnings("ignore", "Palette images with Transparency")
# More than cores: on a network disk a header is nearly all waiting.
THREADS = 16
# Files per task, at most: a future for each file would cost more than the file.
_CHUNK = 256
# EXIF is a TIFF header: how it begins in each byte order, and the type of an orientation.
_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
_SHORT = 3
# Bytes read at a time to find the size of a JPEG: for four of five files of ImageNet one read is enough.
_HEAD = 4096


def _readable_by_pil(image: os.PathLike | str | bytes) -> os.PathLike | str | io.BytesIO:
    return io.BytesIO(image) if isinstance(image, bytes) else image


def orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation of an opened image, 1 to 8; 1, as stored, where no tag says it; None if unclear.

    DALI 2.4 makes room by one of its readers of EXIF and turns by another one. They disagree on a damaged header and on
    two headers of one JPEG, and then it writes beyond the image, which ends the process.
    """
    # Not getexif(), which decodes a whole PNG and reads XMP: DALI knows the EXIF tag only.
    joined = image.info.get("exif") or b""
    parts = [content for _, content in getattr(image, "applist", ()) if content[:6] == b"Exif\0\0"]
    first, *others = (part.removeprefix(b"Exif\0\0") for part in parts or [joined])
    # What is longer than a JPEG's segment goes on in the next one.
    tags = {
        _orientation_in(header) for header in (first, *others) if header is first or header[:4] in _ORDERS
    }
    return tags.pop() if len(tags) == 1 else None


def _orientation_in(header: bytes) -> int | None:
    """Return the orientation in the first directory of a TIFF header, 1 to 8; None for a damaged one."""
    if not header or header[:4] not in _ORDERS:
        return None if header else 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(header[at : at + size], _ORDERS[header[:4]])

    start = number(4, 4)
    # Each entry: two bytes of tag, two of type, four of count, then the value.
    entries = [start + 2 + 12 * i for i in range(number(start, 2))]
    found = [entry for entry in entries if number(entry, 2) == ExifTags.Base.Orientation]
    cut_off = start + 2 + 12 * len(entries) > len(header)
    if cut_off or any(number(entry + 2, 2) != _SHORT for entry in found):
        return None
    tag = number(found[0] + 8, 2) if found else 1
    return tag if 1 <= tag <= 8 else 1


def read_rgb(file: os.PathLike | bytes, *, upright: bool = False, least: int | None = None) -> np.ndarray:
    """Return an image file, or its content, as (H, W, 3) uint8 RGB, 16 bits scaled to 8.

    With `upright` it is turned and mirrored as its EXIF tag says, and else as it is stored. With `least`, a JPEG can be
    smaller, as fast decoding makes it, but not below so many pixels a side. Raises RuntimeError, from PIL's error, when
    it cannot be decoded.
    """
    try:
        with Image.open(_readable_by_pil(file), formats=FORMATS) as image:
            if least is not None:
                image.draft("RGB", (least, least))
            pixels = _rgb(image)
            return _turned(pixels, orientation(image) or 1) if upright else pixels
    except Exception as error:  # PIL's parsers raise OSError, SyntaxError, ValueError, struct.error, ...
        name = "a packed image" if isinstance(file, bytes) else file
        raise RuntimeError(f"{name}: {error}") from error


def _rgb(image: Image.Image) -> np.ndarray:
    # 16-bit gray, which PIL would clip to white; older versions call such a PNG "I".
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        gray = (np.asarray(image, np.uint32) + 128) // 257  # rounded, as DALI does
        return np.repeat(gray.astype(np.uint8)[..., None], 3, axis=2)
    # PIL takes the inks of every JPEG for inverted, as Adobe writes them, and DALI those of Adobe's alone.
    if image.format == "JPEG" and image.mode == "CMYK" and "adobe" not in image.info:
        image = ImageChops.invert(image)
    return np.array(image.convert("RGB"))


def _turned(pixels: np.ndarray, tag: int) -> np.ndarray:
    """Return an image with the EXIF orientation `tag` upright: 2, 4, 5, 7 are mirrored, 5 to 8 lie on a side."""
    if tag >= 5:
        pixels = pixels.swapaxes(0, 1)
    rows, columns = (-1 if tag in turned else 1 for turned in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return np.ascontiguousarray(pixels[::rows, ::columns])


def image_size(file: os.PathLike | str | bytes, *, upright: bool = False) -> tuple[int, int]:
    """Return (height, width) from the header, as `read_rgb` gives them.

    Raises ValueError with the reason why the image cannot be used, and OSError where the disk fails, not the image.
    MAX_PIXELS keeps out decompression bombs: a 20000 x 20000 JPEG of 1 MB takes 4.5 GB to decode.
    """
    too_many = f"more than {MAX_PIXELS / 1e6:g} megapixels"
    try:
        with Image.open(_readable_by_pil(file), formats=FORMATS) as image:
            width, height = image.size
            unlike = image.format == "TIFF" and _differs_in_dali(image)
            tag = orientation(image) if upright else 1
            if tag and tag >= 5:
                width, height = height, width
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except Image.UnidentifiedImageError:
        empty = (len(file) if isinstance(file, bytes) else os.path.getsize(file)) == 0
        kinds = f"not an image in a format that is read ({', '.join(FORMATS)})"
        raise ValueError("an empty file" if empty else kinds) from None
    except Image.DecompressionBombError:  # PIL's own limit, twice as many, comes first
        raise ValueError(too_many) from None
    except Exception as error:  # a broken header fails in as many ways as there are parsers
        if isinstance(error, OSError) and error.errno in LOST:
            raise OSError(error.errno, error.strerror, file) from error
        raise ValueError(f"unreadable header: {type(error).__name__}: {error}") from error
    if unlike:
        raise ValueError("a TIFF that two decoders read differently: save it upright, as 8-bit RGB")
    if tag is None:
        raise ValueError("an EXIF header that two decoders turn by differently: save it upright, without it")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, {too_many}")
    return height, width


def _differs_in_dali(tiff: Image.Image) -> bool:
    """Return whether PIL and DALI give a TIFF other pixels, or only one of them reads it."""
    tags, base = tiff.getexif(), ExifTags.Base
    in_planes = tags.get(base.PlanarConfiguration) == 2
    return bool(
        tags.get(base.Orientation) in range(2, 9)  # which PIL applies
        or tiff.mode in ("F", "I", "LAB")
        or tags.get(base.SamplesPerPixel) == 2  # gray with alpha
        or 1 in np.atleast_1d(tags.get(base.ExtraSamples, ()))  # alpha that the colors are multiplied with
        or (in_planes and (tiff.mode, np.max(tags[base.BitsPerSample])) != ("RGB", 8))
    )


def jpeg_size(file: int, upright: bool) -> tuple[int, int] | None:
    """Return (height, width) of an open JPEG of a common kind up to its pixels; None for all else, which PIL judges.

    PIL takes three times as long for a file, and holds Python's lock meanwhile: threads would not help.
    """
    start, at, size, head = 0, 2, None, os.pread(file, _HEAD, 0)
    if head[:2] != b"\xff\xd8":
        return None
    while True:
        if at + 10 > start + len(head):
            start, head = at, os.pread(file, _HEAD, at)
        segment = head[at - start : at - start + 10]  # FF, the kind, the length from here on, its first bytes
        if len(segment) < 10 or segment[0] != 0xFF:
            return None
        kind, length = segment[1], int.from_bytes(segment[2:4], "big")
        if kind == 0xDA:  # the pixels follow
            return size
        if kind in (0xC0, 0xC1, 0xC2):  # a frame: bits, height, width, number of colors
            height, width = int.from_bytes(segment[5:7], "big"), int.from_bytes(segment[7:9], "big")
            if segment[4] != 8 or segment[9] not in (1, 3, 4) or not 0 < height * width <= MAX_PIXELS:
                return None
            size = height, width
        elif upright and kind == 0xE1 and segment[4:8] == b"Exif":
            return None  # it can be turned
        elif not (kind in (0xC4, 0xDB, 0xDD, 0xFE) or 0xE0 <= kind <= 0xEF):
            return None
        at += 2 + length


def in_threads(work: Callable[[int], Any], count: int, what: object = None) -> list[Any]:
    """Return work(row) of the rows 0..count-1, which are called in no order. Raises what a call raised.

    `what` names the rows on a terminal.
    """
    chunk, results = min(_CHUNK, 1 + count // THREADS), []

    def rows_from(first: int) -> list[Any]:
        return [work(row) for row in range(first, min(first + chunk, count))]

    with ThreadPoolExecutor(THREADS) as pool:
        for some in pool.map(rows_from, range(0, count, chunk)):
            results += some
            if what is not None:
                show_progress(what, len(results), count)
    return results


def read_sizes(
    size_of: Callable[[int], tuple[int, int]], count: int, what: object
) -> tuple[np.ndarray, dict[int, str]]:
    """Return size_of(row) of all rows, int32 (count, 2), and row -> why where it raised ValueError: size 0, 0."""
    sizes, bad = np.zeros((count, 2), np.int32), {}

    def work(row: int) -> None:
        try:
            sizes[row] = size_of(row)
        except ValueError as reason:
            bad[row] = str(reason)

    in_threads(work, count, what)
    return sizes, dict(sorted(bad.items()))


def stamp(status: os.stat_result) -> tuple[int, int]:
    """Return the bytes and the modification time (ns) of a file; a time after the year 2262 wraps in its 64 bits."""
    return status.st_size, (status.st_mtime_ns + 2**63) % 2**64 - 2**63
