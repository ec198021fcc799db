"""Says which file of a failed step cannot be used, and why: DALI's own message often names no file at all."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
TAIL = 1024  # bytes searched for a JPEG's end: some cameras pad it


def bad_images(
    index: Any, indices: Iterable[int], decode: Callable[[os.PathLike], tuple[int, int]]
) -> dict[int, str]:
    """The images among `indices` that training cannot use: index -> reason in words. Order as given, each
    once.

    `decode` gives (height, width) or raises; it must be the decoder that training uses. What decodes without
    a complaint to wrong pixels (a flipped bit inside a JPEG) cannot be told here, nor by the training
    decoder.
    """
    found = {}
    for i in dict.fromkeys(map(int, indices)):
        reason = why_unusable(index.path(i), tuple(index.sizes[i]), decode)
        if reason is not None:
            found[i] = reason
    return found


def why_unusable(
    path: Path, size: tuple[int, int], decode: Callable[[os.PathLike], tuple[int, int]]
) -> str | None:
    """Why the file cannot be used, None if it can. `size` is the (height, width) that crops are drawn for."""
    try:
        decoded = decode(path)
    except Exception as error:
        return diagnosis(path, error)
    if tuple(decoded) != tuple(size):
        (height, width), (indexed_height, indexed_width) = decoded, size
        return (
            f"is {width}x{height} now, but was {indexed_width}x{indexed_height} when the index was made: "
            "make the index again"
        )
    return None


def diagnosis(path: Path, error: Exception) -> str:
    """The plainest true sentence about a file that the decoder refused with `error`."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(32)
            stream.seek(-min(TAIL, os.path.getsize(path)), os.SEEK_END)
            tail = stream.read()
    except FileNotFoundError:
        return "no such file"
    except OSError as problem:
        return f"cannot be read ({problem.strerror or problem})"
    if not head:
        return "empty (0 bytes)"
    try:
        with Image.open(path) as image:
            kind = image.format
    except UnidentifiedImageError:
        return f"not an image: begins with {head[:16]!r}"
    except (
        Exception
    ) as problem:  # a decompression bomb, or a header broken in a way of its own: PIL's words say which
        return f"unreadable header ({problem})"
    if kind == "JPEG" and head.startswith(JPEG_START) and JPEG_END not in tail:
        return "truncated JPEG: the end of the file is missing"
    if kind == "GIF":
        return "a GIF, whatever its name says: the decoder reads JPEG, PNG, BMP, TIFF, WebP and JPEG 2000"
    return f"damaged {kind} ({first_line(error)})"


def first_line(error: Exception) -> str:
    """The line of an error's text that says something: DALI opens with the operator and a traceback of the
    graph."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "ailed" in line or "ailure" in line]
    return (telling or lines or [type(error).__name__])[-1]
