"""Says which file of a failed step cannot be used, and why: DALI's own message often names no file at all."""

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from pipelines.datasets.image_headers import image_size, readable_by_pil

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
CUT_OFF = "a truncated JPEG: its end is missing"
TAIL = 65536  # bytes searched for a JPEG's end; what cameras and editors append is shorter


def bad_images(
    index: Any, indices: Iterable[int], decode: Callable[[os.PathLike | bytes], tuple[int, int]]
) -> dict[int, str]:
    """The images among `indices` that training cannot use: index -> reason in words, in the order given.

    `decode` gives (height, width) or raises; it must be the decoder that training uses. What decodes without
    a complaint to wrong pixels (a flipped bit inside a JPEG) cannot be told here, nor by any decoder.
    """
    distinct = list(dict.fromkeys(map(int, indices)))
    found, refused = {}, []
    for i in distinct:
        image, (height, width) = index.content(i), index.sizes[i].tolist()
        damage = index.damage(i)
        if damage is not None:
            found[i] = damage
            continue
        try:
            now_height, now_width = decode(image)
        except Exception as error:
            refused.append(image)
            found[i] = diagnosis(image, error)
        else:
            if (now_height, now_width) != (height, width):
                found[i] = (
                    f"is {now_width} x {now_height} now, in the index {width} x {height}: make it again"
                )
    if len(refused) == len(distinct) > 1 and all(map(readable, refused)):
        # A GPU that has failed refuses every file. Nobody should throw away a good data set for that.
        return {}
    return found


def readable(image: Path | bytes) -> bool:
    """Whether another decoder than training's reads the whole file."""
    try:
        with Image.open(readable_by_pil(image)) as opened:
            opened.load()
    except Exception:  # PIL's parsers fail with whatever error they come across
        return False
    return True


def diagnosis(image: Path | bytes, error: Exception) -> str:
    """The plainest true sentence about a file that the decoder refused with `error`."""
    try:
        image_size(image)
        if is_cut_off(image):
            return CUT_OFF
    except ValueError as problem:  # absent, empty, no image, a GIF, too many pixels
        return str(problem)
    except OSError as problem:
        return f"cannot be read: {problem.strerror or problem}"
    return f"damaged: {first_line(error)}"


def is_cut_off(image: Path | bytes) -> bool:
    """Whether a JPEG lacks its end marker, which a lenient decoder may forgive; its pixels never contain one."""
    with io.BytesIO(image) if isinstance(image, bytes) else open(image, "rb") as stream:
        if stream.read(len(JPEG_START)) != JPEG_START:
            return False
        stream.seek(-min(TAIL, stream.seek(0, os.SEEK_END)), os.SEEK_END)
        return JPEG_END not in stream.read()


def first_line(error: Exception) -> str:
    """The line of an error that says something: DALI's begin with a traceback of the graph's definition."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "ailed" in line or "ailure" in line]
    return (telling or lines or [type(error).__name__])[-1]
