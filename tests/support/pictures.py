"""Images that tests write: photograph-like texture, in the kinds of file that real folders hold."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex
from tools.bench.pictures import texture
from tools.bench.pictures import write_pictures as write_pictures


def write_image(path: Path, width: int = 8, height: int = 6, **options) -> Path:
    """Write noise of some size, always the same, in the kind of file that the name says; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_images(root: Path, *names: str) -> Path:
    """Write an image of 8 x 6 pixels under each name; return `root`."""
    for name in names:
        write_image(root / name)
    return root


def cut_short(path: Path) -> Path:
    """Leave a JPEG its header and half of its pixels; return the path."""
    content = path.read_bytes()
    path.write_bytes(content[: (content.index(b"\xff\xda") + len(content)) // 2])
    return path


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    """Return the content of an image file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def unusable_files(jpeg: bytes) -> dict[str, bytes]:
    """Return the contents of files, by name, that no loader can use; some are damaged copies of `jpeg`."""
    image = Image.fromarray(texture(0, 40, 40))
    png = encoded(image, "PNG")
    return {
        "half.jpg": jpeg[: len(jpeg) // 2],
        "beginning.jpg": jpeg[: jpeg.index(b"\xff\xda") // 2],
        "unended.jpg": jpeg[:-2],
        "half.png": png[: len(png) // 2],
        "empty.jpg": b"",
        "noise.jpg": np.random.default_rng(0).bytes(4000),
        "page.jpg": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "gif.JPEG": encoded(image, "GIF"),
    }


def write_kinds(root: Path, height: int, width: int, *, upright: bool = False) -> ImageIndex:
    """Write one class of one picture in every kind of file: JPEG of all kinds, PNG, gray of 16 bits."""
    root = root / "kinds"
    root.mkdir(parents=True)
    picture = Image.fromarray(texture(7, height, width))
    rotated = Image.Exif()
    rotated[0x0112] = 6  # "turn by 90 degrees"
    picture.save(root / "color.jpg", quality=92)
    picture.convert("L").save(root / "gray.jpg", quality=92)
    ink = encoded(picture.convert("CMYK"), "JPEG", quality=92)
    (root / "cmyk.jpg").write_bytes(ink)
    # Without Adobe's segment, which says that the inks are inverted: the picture's negative.
    (root / "ink.jpg").write_bytes(ink[:2] + ink[ink.index(b"Adobe") + 12 :])
    picture.save(root / "progressive.jpg", quality=92, progressive=True)
    picture.save(root / "rotated.jpg", quality=92, exif=rotated)
    picture.save(root / "lossless.png")
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (height, width), np.uint16))
    deep.save(root / "deep.png")
    deep.save(root / "deep.tif")
    return image_folder(root.parent, upright=upright)
