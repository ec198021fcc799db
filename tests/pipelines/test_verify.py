"""The check over all files: good, odd and broken images through the real decoders, none of which ends it."""

import itertools
import os
import runpy
import struct
import zlib
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from pipelines import verify
from pipelines.data_errors import DataError
from pipelines.datasets import image_headers
from pipelines.datasets.folders import image_tree
from pipelines.datasets.index import ImageIndex, load_index, save_index
from pipelines.engines import engine_of
from pipelines.verify import check
from tests.support.pictures import cut_short, encoded, texture, unusable_files, write_image, write_kinds

WIDTH, HEIGHT = 80, 60


def zoo() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Files that train, besides those of `write_kinds`, and files that do not, by name."""
    image = Image.fromarray(texture(0, HEIGHT, WIDTH))
    jpeg = encoded(image, "JPEG", quality=95)
    scratched = bytearray(jpeg)
    scratched[len(jpeg) // 2 : len(jpeg) // 2 + 100] = b"\x55" * 100
    good = {
        "plain.jpg": jpeg,
        "appended.jpg": jpeg + b"film" * 17_500,
        "scratched.jpg": bytes(scratched),  # decodes to wrong pixels: no decoder notices
        "png.JPEG": encoded(image, "PNG"),
        "webp.jpg": encoded(image, "WEBP"),
        "rgba.png": encoded(image.convert("RGBA"), "PNG"),
        "palette.png": encoded(image.convert("P"), "PNG"),
        "plain.bmp": encoded(image, "BMP"),
        "plain.tif": encoded(image, "TIFF"),
        "one.jpg": encoded(image.resize((1, 1)), "JPEG"),
    }
    thumbnail, turned, long = Image.Exif(), Image.Exif(), PngInfo()
    long.add_text("note", "x" * (2 << 20), zip=True)
    thumbnail[0x9286] = b"ends with \xff\xd9, as a thumbnail does"
    turned[0x0112] = 6
    bad = {"thumbnail.jpg": encoded(image, "JPEG", exif=thumbnail)[:-2]}
    # The entry of the tag ExtraSamples, of which PIL writes one value only.
    straight, multiplied = (struct.pack("<HHII", 338, 3, 1, kind) for kind in (2, 1))
    floats = Image.fromarray(texture(0, HEIGHT, WIDTH)[..., 0] / np.float32(255))
    bad |= {
        "12 bits.jpg": jpeg.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
        "text.png": encoded(image, "PNG", pnginfo=long),  # PIL raises ValueError
        "turned.tif": encoded(image, "TIFF", exif=turned),
        "floats.tif": encoded(floats, "TIFF"),
        "alpha.tif": encoded(image.convert("LA"), "TIFF"),
        "planes.tif": encoded(image.convert("RGBA"), "TIFF", tiffinfo={284: 2}),
        "multiplied.tif": encoded(image.convert("RGBA"), "TIFF").replace(straight, multiplied),
    }
    return good, bad | unusable_files(jpeg)


def write_jpegs(folder: Path, count: int, short: Container[int] = ()) -> None:
    """Write JPEGs of widths from 60 on, those in `short` without their second half."""
    for i in range(count):
        path = write_image(folder / f"{i:02d}.jpg", 60 + i, 50)
        if i in short:
            cut_short(path)


def fake_engine(monkeypatch, run) -> None:
    """Let `run(numbers of a batch)` decode."""

    def start(plan, options, *, draws, first_step):
        steps = itertools.count(first_step)
        return SimpleNamespace(run=lambda: run(draws(next(steps)).indices.tolist()))

    monkeypatch.setattr(verify, "engine_of", lambda options: start)


def test_check_finds_the_files_that_cannot_train_in_their_state_of_today(tmp_path, reader):
    write_kinds(tmp_path, HEIGHT, WIDTH)
    folder, (good, bad) = tmp_path / "kinds", zoo()
    for name, content in (good | bad).items():
        (folder / name).write_bytes(content)
    index = image_tree(folder)
    assert {"12 bits.jpg", "text.png"} < {index.files[i] for i in index.bad}
    checked = check(index, reader)
    reasons = {os.path.basename(path): reason for path, reason in checked.bad_files()}
    assert set(reasons) == set(bad)
    for name in ("half.jpg", "unended.jpg", "thumbnail.jpg"):
        assert reasons[name] == "a truncated JPEG: its end is missing"
    assert reasons["empty.jpg"] == "an empty file"
    assert all("two decoders read differently" in reasons[name] for name in bad if name.endswith("tif"))
    assert "damaged" in reasons["half.png"]
    for name, size in zip(checked.files, checked.sizes.tolist()):
        assert size == ([0, 0] if name in bad else [1, 1] if name == "one.jpg" else [HEIGHT, WIDTH]), name

    (folder / "empty.jpg").write_bytes(good["plain.jpg"])
    index = image_tree(folder)
    (folder / "one.jpg").unlink()
    write_image(folder / "plain.bmp", width=HEIGHT, height=WIDTH)
    checked = check(index, reader)
    reasons = {os.path.basename(path): reason for path, reason in checked.bad_files()}
    assert "empty.jpg" not in reasons and reasons["one.jpg"] == "no such file"
    assert reasons["plain.bmp"] == "is 60 x 80 now, in the index 80 x 60: make the index again"
    save_index(checked, tmp_path / "index.npz")
    kept = load_index(tmp_path / "index.npz")
    assert kept.bad == checked.bad and kept.fingerprint() == checked.fingerprint()


def test_check_blames_only_the_bad_files_among_many_batches(tmp_path, reader, monkeypatch):
    """Single files are decoded only after their batch has failed, and an engine that has failed is not used again."""
    monkeypatch.setattr(verify, "_BATCH", 4)
    write_jpegs(tmp_path, 23, short=(0, 9, 10, 22))
    seen, started = [], []

    def counting(options):
        return lambda plan, *rest, **more: (
            started.append(plan.batch) or engine_of(options)(plan, *rest, **more)
        )

    monkeypatch.setattr(verify, "engine_of", counting)
    monkeypatch.setattr(verify, "show_progress", lambda what, *count: seen.append(count))
    checked = check(image_tree(tmp_path), reader)
    assert checked.bad == dict.fromkeys([0, 9, 10, 22], "a truncated JPEG: its end is missing")
    sizes = [[0, 0] if i in checked.bad else [50, 60 + i] for i in range(23)]
    assert checked.sizes.tolist() == sizes and seen == [(done, 23) for done in (4, 8, 12, 16, 20, 23)]
    assert started == [4, 1, 1, 4, 1, 1, 1, 4, 1]


@pytest.mark.gpu
def test_check_on_a_gpu_finds_what_it_finds_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "_BATCH", 4)
    write_jpegs(tmp_path, 9, short=(1, 2, 8))
    on_gpu, on_cpu = (check(image_tree(tmp_path), "dali", device=device) for device in ("gpu", "cpu"))
    assert on_gpu.bad == on_cpu.bad == dict.fromkeys([1, 2, 8], "a truncated JPEG: its end is missing")
    assert on_gpu.sizes.tolist() == on_cpu.sizes.tolist()


def test_check_survives_a_bad_image_of_another_kind_in_a_large_batch(tmp_path, reader):
    """DALI's decoder ends the process there."""
    (tmp_path / "00.png").write_bytes(zoo()[1]["half.png"])
    write_jpegs(tmp_path, 40)
    assert [*check(image_tree(tmp_path), reader).bad] == [image_tree(tmp_path).files.index("00.png")]


def test_check_decodes_fewer_large_images_at_a_time(tmp_path, monkeypatch):
    sizes = np.array([[9000, 9000], *[[1000, 1000]] * 40, [3000, 4000], *[[10, 10]] * 33], np.int32)
    index = ImageIndex(tmp_path, [f"{i}.jpg" for i in range(75)], np.full(75, -1), (), sizes)
    batches = []
    fake_engine(monkeypatch, batches.append)
    monkeypatch.setattr(verify, "_cut_off", lambda image: None)
    assert check(index, "torchvision").bad == {}
    assert sorted(i for batch in batches for i in batch) == list(range(75))
    assert batches[:2] == [[0], [41]] and [len(batch) for batch in batches[2:]] == [32, 32, 9]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_check_refuses_too_many_pixels_without_decoding_them(tmp_path, monkeypatch):
    for name, size in (("large.png", (11000, 10000)), ("bomb.png", (20000, 20000))):
        content = bytearray(encoded(Image.new("1", (1, 1)), "PNG"))
        content[16:24] = struct.pack(">II", *size)  # in its header, which has a checksum
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
        (tmp_path / name).write_bytes(content)
    write_image(tmp_path / "small.png", 20, 5)
    decoded = []
    fake_engine(monkeypatch, decoded.extend)
    checked = check(image_tree(tmp_path), "torchvision")
    assert decoded == [2]
    too_many = "more than 100 megapixels"
    assert checked.bad == {0: too_many, 1: f"11000 x 10000 pixels, {too_many}"}


def test_limit_of_pil_that_a_program_has_raised_stays(monkeypatch):
    for own, kept in ((None, None), (10**9, 10**9), (89_478_485, 100_000_000)):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", own)
        runpy.run_path(image_headers.__file__)
        assert kept == Image.MAX_IMAGE_PIXELS


def test_check_blames_a_decoder_that_refuses_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "_BATCH", 3)
    write_jpegs(tmp_path, 3)
    fake_engine(monkeypatch, mock.Mock(side_effect=RuntimeError("no memory on the device")))
    for pixels in (verify._BATCH_PIXELS, 2 * 62 * 50):  # whole batches, and less
        monkeypatch.setattr(verify, "_BATCH_PIXELS", pixels)
        said = r"refuses 3 files in a row that PIL reads.*no memory on the device"
        with pytest.raises(DataError, match=said):
            check(image_tree(tmp_path), "torchvision")
    write_jpegs(tmp_path, 3, short=range(3))
    assert len(check(image_tree(tmp_path), "torchvision").bad) == 3
