"""Find the files of a failed step that cannot be used, and say why: DALI's own message often names no file."""

import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from PIL import Image

from pipelines.datasets.image_headers import image_size, readable_by_pil
from pipelines.datasets.index import ImageIndex

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
CUT_OFF = "a truncated JPEG: its end is missing"
TAIL = 65536  # bytes searched for a JPEG's end; what cameras and editors append is shorter

# Gives, for each file or packed content, (height, width) as decoded, or the error. It must decode as training does.
Decode = Callable[[Sequence[Path | bytes]], list[tuple[int, int] | Exception]]


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
            found[i] = diagnosis(image, outcome)
        elif outcome != (height, width):
            found[i] = (
                f"is {outcome[1]} x {outcome[0]} now, in the index {width} x {height}: make the index again"
            )
    if len(refused) == len(distinct) > 1 and all(map(readable, refused)):
        # A GPU that has failed refuses every file. Nobody should delete a good data set because of that.
        return {}
    return found


def readable(image: Path | bytes) -> bool:
    """Return whether PIL reads the whole file."""
    try:
        with Image.open(readable_by_pil(image)) as opened:
            opened.load()
    except Exception:  # PIL's parsers raise many kinds of errors
        return False
    return True


def diagnosis(image: Path | bytes, error: Exception) -> str:
    """Return the plainest true sentence about a file that the decoder refused with `error`."""
    try:
        image_size(image)
        if is_cut_off(image):
            return CUT_OFF
    except ValueError as problem:  # absent, empty, no image, a GIF, too many pixels
        return str(problem)
    except OSError as problem:
        return f"cannot be read: {problem.strerror or problem}"
    return f"damaged: {_telling_line(error)}"


def is_cut_off(image: Path | bytes) -> bool:
    """Return whether a JPEG lacks its end marker, which a lenient decoder can forgive; pixels never contain one."""
    with io.BytesIO(image) if isinstance(image, bytes) else open(image, "rb") as stream:
        if stream.read(len(JPEG_START)) != JPEG_START:
            return False
        stream.seek(-min(TAIL, stream.seek(0, os.SEEK_END)), os.SEEK_END)
        return JPEG_END not in stream.read()


def _telling_line(error: Exception) -> str:
    """Return the line of an error that names the cause: DALI's begin with a traceback of the graph's definition."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "ailed" in line or "ailure" in line]
    return (telling or lines or [type(error).__name__])[-1]
