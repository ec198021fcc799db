"""The check over all files: good, odd and broken images through the real decoders, none of which ends it."""

import os

import numpy as np
import pytest
from PIL import Image

from pipelines import verify
from pipelines.data_errors import DataError
from pipelines.datasets.folders import image_tree
from pipelines.datasets.in_memory import synthetic
from pipelines.datasets.index_file import load_index, save_index
from pipelines.verify import check
from tests.support.pictures import cut_short, encoded, texture, unusable_files, write_image, write_kinds
from tests.support.streams import needs_dali

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
    return good, unusable_files(jpeg)


def fake_decoder(monkeypatch, decode) -> None:
    monkeypatch.setattr(verify, "_decoder", lambda *_: decode)


def test_check_finds_the_files_that_cannot_train_in_their_state_of_today(tmp_path, reader):
    write_kinds(tmp_path, HEIGHT, WIDTH)
    folder, (good, bad) = tmp_path / "kinds", zoo()
    for name, content in (good | bad).items():
        (folder / name).write_bytes(content)
    index = image_tree(folder)
    checked = check(index, reader)
    reasons = {os.path.basename(path): reason for path, reason in checked.bad_files()}
    assert set(reasons) == set(bad)
    assert reasons["half.jpg"] == reasons["unended.jpg"] == "a truncated JPEG: its end is missing"
    assert reasons["empty.jpg"] == "an empty file"
    assert "not an image" in reasons["noise.jpg"] and "not an image" in reasons["page.jpg"]
    assert "a GIF" in reasons["gif.JPEG"]
    assert "damaged" in reasons["half.png"]
    for name, size in zip(checked.files, checked.sizes.tolist()):
        assert size == ([0, 0] if name in bad else [1, 1] if name == "one.jpg" else [HEIGHT, WIDTH]), name

    (folder / "empty.jpg").write_bytes(good["plain.jpg"])
    (folder / "one.jpg").unlink()
    checked = check(index, reader)
    reasons = {os.path.basename(path): reason for path, reason in checked.bad_files()}
    assert "empty.jpg" not in reasons and reasons["one.jpg"] == "no such file"
    save_index(checked, tmp_path / "index.npz")
    kept = load_index(tmp_path / "index.npz")
    assert kept.bad == checked.bad and kept.fingerprint() == checked.fingerprint()


def test_check_blames_only_the_bad_files_among_many_batches(tmp_path, reader, monkeypatch):
    monkeypatch.setattr(verify, "_BATCH", 4)
    monkeypatch.setattr(verify, "_BLOCK", 10)
    for i in range(23):
        path = write_image(tmp_path / f"{i:02d}.jpg", 60 + i, 50)
        if i in (0, 9, 10, 22):
            cut_short(path)
    seen = []
    checked = check(image_tree(tmp_path), reader, progress=lambda *count: seen.append(count))
    assert checked.bad == dict.fromkeys([0, 9, 10, 22], "a truncated JPEG: its end is missing")
    sizes = [[0, 0] if i in checked.bad else [50, 60 + i] for i in range(23)]
    assert checked.sizes.tolist() == sizes and seen == [(10, 23), (20, 23), (23, 23)]


@needs_dali
def test_check_decodes_single_files_only_after_a_failed_batch(tmp_path, monkeypatch):
    from pipelines.dali import graphs

    built = []
    build = graphs.decoded
    monkeypatch.setattr(graphs, "decoded", lambda *a, **k: built.append(k["batch_size"]) or build(*a, **k))
    monkeypatch.setattr(verify, "_BATCH", 4)
    for i in range(12):
        write_image(tmp_path / f"{i:02d}.jpg", 60, 50)
    index = image_tree(tmp_path)
    check(index, "dali")
    assert built == [4]
    cut_short(tmp_path / "05.jpg")
    built.clear()
    assert list(check(index, "dali").bad) == [5]
    # A failure ends a pipeline: one more for the third batch, and one more for the files after the bad one.
    assert built == [4, 1, 1, 4]


def test_check_decodes_fewer_large_images_at_a_time():
    megapixel = [1000, 1000]
    sizes = np.array([[9000, 9000]] + [megapixel] * 40 + [[9000, 9000]] + [[10, 10]] * 33, np.int32)
    batches = list(verify._batches(list(range(len(sizes))), sizes))
    assert [i for batch in batches for i in batch] == list(range(len(sizes)))
    assert [len(batch) for batch in batches] == [1, 32, 8, 1, 32, 1]
    for batch in batches:
        assert len(batch) == 1 or sizes[batch].prod(1).sum() <= verify._BATCH_PIXELS
    assert list(verify._batches([], sizes)) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_check_refuses_too_many_pixels_without_decoding_them(tmp_path, monkeypatch):
    Image.new("1", (11000, 10000)).save(tmp_path / "large.png")
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    write_image(tmp_path / "small.png", 20, 5)
    decoded = []
    fake_decoder(monkeypatch, lambda paths: decoded.extend(paths) or [(5, 20)] * len(paths))
    checked = check(image_tree(tmp_path), "torchvision")
    assert decoded == [tmp_path / "small.png"]
    too_many = "more than 100 megapixels"
    assert checked.bad == {0: too_many, 1: f"11000 x 10000 pixels, {too_many}"}


def test_check_doubts_a_lenient_decoder(tmp_path, monkeypatch):
    """It can forgive a missing end, and decode to another size than the header's."""
    thumbnail = Image.Exif()
    thumbnail[0x9286] = b"ends with \xff\xd9, as a thumbnail does"
    path = write_image(tmp_path / "a.jpg", exif=thumbnail)
    path.write_bytes(path.read_bytes()[:-2])
    write_image(tmp_path / "b.png")
    fake_decoder(monkeypatch, lambda paths: [(6, 8)] * len(paths))
    assert check(image_tree(tmp_path), "torchvision").bad == {0: "a truncated JPEG: its end is missing"}
    fake_decoder(monkeypatch, lambda paths: [(8, 6)] * len(paths))
    checked = check(image_tree(tmp_path), "torchvision")
    assert checked.bad[1] == "decodes to 6 x 8 pixels, but its header says 8 x 6"
    assert checked.sizes[1].tolist() == [0, 0]


def test_check_blames_a_decoder_that_refuses_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "_BATCH", 3)
    for i in range(3):
        write_image(tmp_path / f"{i}.jpg", 60, 50)
    fake_decoder(monkeypatch, lambda paths: [RuntimeError("no memory on the device")] * len(paths))
    for pixels in (verify._BATCH_PIXELS, 2 * 60 * 50):  # whole batches, and less
        monkeypatch.setattr(verify, "_BATCH_PIXELS", pixels)
        said = r"refuses 3 files in a row that PIL reads.*no memory on the device"
        with pytest.raises(DataError, match=said):
            check(image_tree(tmp_path), "torchvision")
    for i in range(3):
        cut_short(tmp_path / f"{i}.jpg")
    assert len(check(image_tree(tmp_path), "torchvision").bad) == 3


def test_check_refuses_data_in_memory():
    with pytest.raises(DataError, match="held in memory"):
        check(synthetic(4, 2, 8, seed=0))
