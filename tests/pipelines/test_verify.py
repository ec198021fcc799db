"""The check over all files: a zoo of good, odd and broken images through the real decoders, none of which ends it."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from pipelines import verify as module
from pipelines.backend import dali_problem
from pipelines.data_errors import DataError
from pipelines.datasets.folders import image_tree
from pipelines.datasets.in_memory import digits
from pipelines.datasets.index_io import load_index, save_index
from pipelines.verify import check
from tests.pipelines.datasets.test_index import write_image

WIDTH, HEIGHT = 80, 60

needs_dali = pytest.mark.skipif(dali_problem() is not None, reason=f"no DALI: {dali_problem()}")
both_decoders = pytest.mark.parametrize("backend", [pytest.param("dali", marks=needs_dali), "torchvision"])


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def zoo() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Files that train and files that do not, by name."""
    draws = np.random.default_rng(0)
    coarse = Image.fromarray(draws.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    image = coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    deep = Image.fromarray(np.asarray(image)[..., 0].astype(np.uint16) * 257)
    jpeg, png = encoded(image, "JPEG", quality=95), encoded(image, "PNG")
    rotated = Image.Exif()
    rotated[0x0112] = 6
    scratched = bytearray(jpeg)
    scratched[len(jpeg) // 2 : len(jpeg) // 2 + 100] = b"\x55" * 100
    good = {
        "plain.jpg": jpeg,
        "progressive.JPEG": encoded(image, "JPEG", progressive=True),
        "grey.jpg": encoded(image.convert("L"), "JPEG"),
        "cmyk.jpg": encoded(image.convert("CMYK"), "JPEG"),
        "rotated.jpg": encoded(image, "JPEG", exif=rotated),
        "appended.jpg": jpeg + b"junk" * 50,
        "scratched.jpg": bytes(scratched),  # decodes to wrong pixels: no decoder can tell
        "png.JPEG": png,
        "webp.jpg": encoded(image, "WEBP"),
        "rgba.png": encoded(image.convert("RGBA"), "PNG"),
        "palette.png": encoded(image.convert("P"), "PNG"),
        "deep.png": encoded(deep, "PNG"),
        "plain.bmp": encoded(image, "BMP"),
        "plain.tif": encoded(image, "TIFF"),
        "one.jpg": encoded(image.resize((1, 1)), "JPEG"),
    }
    bad = {
        "half.jpg": jpeg[: len(jpeg) // 2],
        "beginning.jpg": jpeg[:600],
        "unended.jpg": jpeg[:-2],
        "half.png": png[: len(png) // 2],
        "empty.jpg": b"",
        "noise.jpg": draws.bytes(3000),
        "page.jpg": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "gif.JPEG": encoded(image, "GIF"),
    }
    return good, bad


def cut_short(path) -> None:
    """Leaves a JPEG its header and half of its pixels."""
    content = path.read_bytes()
    path.write_bytes(content[: (content.index(b"\xff\xda") + len(content)) // 2])


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "zoo"
    root.mkdir()
    for files in zoo():
        for name, content in files.items():
            (root / name).write_bytes(content)
    return root


@both_decoders
def test_the_check_tells_the_files_that_train_from_those_that_do_not(folder, backend):
    good, bad = zoo()
    report = check(image_tree(folder), backend)
    reasons = {os.path.basename(path): reason for path, reason in report.bad}
    assert set(reasons) == set(bad)
    assert reasons["half.jpg"] == reasons["unended.jpg"] == "a truncated JPEG: its end is missing"
    assert reasons["empty.jpg"] == "an empty file"
    assert "not an image" in reasons["noise.jpg"] and "not an image" in reasons["page.jpg"]
    assert "a GIF" in reasons["gif.JPEG"]
    assert "damaged" in reasons["half.png"]
    sizes = dict(zip(report.index.files, report.index.sizes.tolist()))
    for name in good | bad:
        expected = [0, 0] if name in bad else [1, 1] if name == "one.jpg" else [HEIGHT, WIDTH]
        assert sizes[name] == expected, name
    text = str(report)
    assert text.count("\n") == len(bad)
    assert text.endswith(f"23 images checked with {report.decoder}: 8 cannot be used")


@both_decoders
def test_a_good_folder_is_said_to_be_good_and_progress_is_told(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 2)
    for i in range(5):
        write_image(tmp_path / f"{i}.jpg", 8 + i, 6)
    told = []
    report = check(image_tree(tmp_path), backend, progress=lambda *count: told.append(count))
    assert report.bad == [] and str(report).endswith("all of them good")
    assert report.index.sizes.tolist() == [[6, 8 + i] for i in range(5)]
    assert told == [(2, 5), (4, 5), (5, 5)]


@both_decoders
def test_one_bad_file_among_many_batches_is_the_only_one_blamed(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(module, "_BATCH", 4)
    monkeypatch.setattr(module, "_BLOCK", 10)
    for i in range(23):
        path = write_image(tmp_path / f"{i:02d}.jpg", 60 + i, 50)
        if i in (0, 9, 10, 22):
            cut_short(path)
    report = check(image_tree(tmp_path), backend)
    assert report.index.bad == dict.fromkeys([0, 9, 10, 22], "a truncated JPEG: its end is missing")


@needs_dali
def test_dali_decodes_whole_batches_and_single_files_only_after_a_failure(tmp_path, monkeypatch):
    from pipelines.dali import graphs
    from pipelines.dali.engine import DaliDecoder

    singles, built = [], []
    build = graphs.decoded
    monkeypatch.setattr(graphs, "decoded", lambda *a, **k: built.append(k["batch_size"]) or build(*a, **k))
    decode = DaliDecoder.__call__
    monkeypatch.setattr(
        DaliDecoder, "__call__", lambda self, path: singles.append(path.name) or decode(self, path)
    )
    monkeypatch.setattr(module, "_BATCH", 4)
    for i in range(12):
        write_image(tmp_path / f"{i:02d}.jpg", 60, 50)
    index = image_tree(tmp_path)
    check(index, "dali")
    assert singles == [] and built == [4]
    cut_short(tmp_path / "05.jpg")
    assert list(check(index, "dali").index.bad) == [5]
    assert singles == ["04.jpg", "05.jpg", "06.jpg", "07.jpg"]
    # A failure is a pipeline's end, as DALI itself says, whether it would run on or not.
    assert built[1:].count(4) == 2 and built[1:].count(1) == 2


def test_large_images_are_decoded_fewer_at_a_time():
    megapixel = [1000, 1000]
    sizes = np.array([[9000, 9000]] + [megapixel] * 40 + [[9000, 9000]] + [[10, 10]] * 33, np.int32)
    batches = list(module._batches(list(range(len(sizes))), sizes))
    assert [i for batch in batches for i in batch] == list(range(len(sizes)))
    assert [len(batch) for batch in batches] == [1, 32, 8, 1, 32, 1]
    for batch in batches:
        assert len(batch) == 1 or sizes[batch].prod(1).sum() <= module._BATCH_PIXELS
    assert list(module._batches([], sizes)) == []


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_many_pixels_are_refused_undecoded(tmp_path, monkeypatch):
    Image.new("1", (11000, 10000)).save(tmp_path / "large.png")
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    write_image(tmp_path / "small.png", 20, 5)
    decoded = []
    decode = module._with_pil(1)
    monkeypatch.setattr(
        module, "_with_pil", lambda threads: lambda paths: decoded.extend(paths) or decode(paths)
    )
    report = check(image_tree(tmp_path), "torchvision")
    assert decoded == [tmp_path / "small.png"]
    assert all("more than 100 megapixels" in reason for _, reason in report.bad) and len(report.bad) == 2
    report = check(image_tree(tmp_path), "torchvision", max_pixels=99)
    (small,) = [reason for path, reason in report.bad if "small" in path]
    assert small.startswith("20 x 5 pixels, more than")


def test_a_jpeg_without_its_end_is_bad_even_where_the_decoder_forgives_it(tmp_path, monkeypatch):
    path = write_image(tmp_path / "a.jpg", 8, 6)
    path.write_bytes(path.read_bytes()[:-2])
    write_image(tmp_path / "b.png", 8, 6)
    monkeypatch.setattr(module, "_with_pil", lambda threads: lambda paths: [(6, 8)] * len(paths))
    assert check(image_tree(tmp_path), "torchvision").index.bad == {0: "a truncated JPEG: its end is missing"}


def test_a_decoder_that_disagrees_with_the_header_is_told(tmp_path, monkeypatch):
    write_image(tmp_path / "a.jpg", 8, 6)
    monkeypatch.setattr(module, "_with_pil", lambda threads: lambda paths: [(8, 6)])
    report = check(image_tree(tmp_path), "torchvision")
    assert report.index.bad == {0: "decodes to 6 x 8 pixels, but its header says 8 x 6"}
    assert report.index.sizes.tolist() == [[0, 0]]


def test_a_decoder_that_refuses_everything_is_blamed_instead_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BATCH", 3)
    for i in range(3):
        write_image(tmp_path / f"{i}.jpg", 60, 50)
    failing = [RuntimeError("no memory on the device")] * 3
    monkeypatch.setattr(module, "_with_pil", lambda threads: lambda paths: failing)
    with pytest.raises(DataError, match=r"refuses 3 files in a row that PIL reads.*no memory on the device"):
        check(image_tree(tmp_path), "torchvision")
    for i in range(3):
        cut_short(tmp_path / f"{i}.jpg")
    assert len(check(image_tree(tmp_path), "torchvision").bad) == 3


@both_decoders
def test_a_check_sees_the_files_of_today_and_its_index_is_kept(folder, tmp_path, backend):
    index = image_tree(folder)
    (folder / "empty.jpg").write_bytes((folder / "plain.jpg").read_bytes())
    (folder / "one.jpg").unlink()
    report = check(index, backend)
    reasons = {os.path.basename(path): reason for path, reason in report.bad}
    assert "empty.jpg" not in reasons and reasons["one.jpg"] == "no such file"
    save_index(report.index, tmp_path / "index.npz")
    kept = load_index(tmp_path / "index.npz")
    assert kept.bad == report.index.bad and kept.fingerprint() == report.index.fingerprint()


def test_data_in_memory_have_nothing_to_check():
    pytest.importorskip("sklearn")
    with pytest.raises(DataError, match="held in memory"):
        check(digits())


def test_an_unknown_back_end_is_refused(tmp_path):
    write_image(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="backend"):
        check(image_tree(tmp_path), "pillow")
