"""The index of a data set: a table of names, headers of many files, and a file verified when it is read."""

import errno
import fcntl
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.datasets import folders, image_headers
from pipelines.datasets.folders import image_folder
from pipelines.datasets.image_headers import read_rgb
from pipelines.datasets.index import ImageIndex, load_index, save_index
from pipelines.datasets.names import as_lines, from_lines
from tests.support.archives import Trap, rewritten
from tests.support.pictures import encoded, write_image

letters = st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])
# Names as Python reads them from a disk with UTF-8 names, in any locale.
words = st.text(letters, max_size=12).map(lambda text: os.fsdecode(text.encode()))


@pytest.fixture
def index(tmp_path) -> ImageIndex:
    for name, width in {"cat/a.jpg": 8, "cat/b.png": 9, "dog/a.jpg": 10, "dog/c.jpg": 11}.items():
        write_image(tmp_path / "images" / name, width)
    return image_folder(tmp_path / "images")


def small_index(**changes) -> ImageIndex:
    sizes = np.array([[6, 8], [6, 9]], np.int32)
    parts = {"root": Path("somewhere"), "files": ["a.jpg", "b.jpg"], "labels": np.array([0, -1])}
    return ImageIndex(**(parts | {"classes": ("cat",), "sizes": sizes} | changes))


@given(st.lists(words, max_size=30))
def test_names_come_back_from_their_lines(names):
    lines = as_lines(names)
    assert from_lines(lines) == names and lines.tobytes() == b"".join(os.fsencode(n) + b"\n" for n in names)


def test_names_refuse_what_cannot_be_a_line():
    wrong = ["two\nlines", "two\rlines", os.fsdecode(b"caf\xe9.jpg")]
    for name in wrong:
        with pytest.raises(DataError, match="1 name with"):
            as_lines(["good", name])
    with pytest.raises(DataError, match=r"^9 names with .* renamed: .*'caf\\udce9.jpg'.* and 4 more$"):
        as_lines(["good", *wrong * 3])
    with pytest.raises(DataError, match="cut off"):
        from_lines(as_lines(["one", "two"])[:-1])


def headers(root: Path, names: list[str]) -> ImageIndex:
    return folders.with_headers(root, names, np.full(len(names), -1), ())


def test_read_headers_of_jpegs_agree_with_pil(tmp_path, monkeypatch):
    """Each kind of JPEG, and each with bytes exchanged, has the size that PIL finds, unless PIL refuses it."""
    image = Image.fromarray(np.zeros((5, 7, 3), np.uint8))
    kinds = {"plain": {}, "progressive": {"progressive": True}, "icc": {"icc_profile": bytes(90_000)}}
    kinds["long"] = {"exif": b"Exif\0\0" + bytes(9000)}
    files = {name: encoded(image, "JPEG", **options) for name, options in kinds.items()}
    files |= {mode: encoded(image.convert(mode), "JPEG") for mode in ("L", "CMYK")}
    calls = []
    monkeypatch.setattr(image_headers, "image_size", lambda path: calls.append(path) or (0, 0))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert headers(tmp_path, list(files)).sizes.tolist() == [[5, 7]] * len(files) and not calls
    monkeypatch.undo()
    draws = np.random.default_rng(0)
    for number in range(300):
        damaged = bytearray(files["plain"])
        damaged[int(draws.integers(2, 400))] = int(draws.integers(256))
        (tmp_path / f"{number}.jpg").write_bytes(damaged)
    names = [f"{number}.jpg" for number in range(300)]
    found = headers(tmp_path, names)
    monkeypatch.setattr(image_headers, "jpeg_size", lambda file, upright: None)
    by_pil = headers(tmp_path, names)
    agree = (found.sizes == by_pil.sizes).all(axis=1)
    assert set(found.bad) <= set(by_pil.bad) >= set(np.flatnonzero(~agree)) and agree.sum() > 200


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_read_rgb_scales_gray_of_16_bits(tmp_path, suffix):
    ramp = np.arange(0, 2**16, 16, np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / f"ramp.{suffix}")
    pixels = read_rgb(tmp_path / f"ramp.{suffix}")
    assert pixels.dtype == np.uint8 and (pixels == np.rint(ramp / 257)[..., None]).all()


def test_read_headers_of_many_chunks_land_in_their_rows(tmp_path, monkeypatch):
    names = [f"{i}.bmp" for i in range(600)]  # more than two chunks
    for i, name in enumerate(names):
        Image.new("L", (1 + i % 7, 1 + i % 5)).save(tmp_path / name)
    found = headers(tmp_path, names)
    assert found.sizes.tolist() == [[1 + i % 5, 1 + i % 7] for i in range(600)]
    assert found.stamps[:, 0].tolist() == [os.path.getsize(tmp_path / name) for name in names]

    def slow_at_first(path, **how):
        if path.endswith("/0.bmp"):
            time.sleep(0.1)
        raise ValueError("bad")

    monkeypatch.setattr(image_headers, "image_size", slow_at_first)
    assert list(headers(tmp_path, names).bad) == list(range(600))  # in order, however long one takes


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": np.array([0])},
        {"labels": np.array([0, 1])},
        {"labels": np.array([0, -2])},
        {"sizes": np.zeros((2, 2))},
        {"stamps": np.zeros((1, 2), np.int64)},
        {"pixels": np.zeros((2, 4, 4, 1), np.uint8)},
        {"presence": np.array([[1], [2]], np.int8)},
        {"presence": np.array([[1]], np.int8)},
        {"bad": {2: "why"}},
        {"changed": (-1,)},
    ],
)
def test_index_refuses_parts_that_do_not_fit(changes):
    with pytest.raises(DataError):
        small_index(**changes)


def test_fingerprint_covers_what_decides_a_run():
    base = small_index().fingerprint()
    stamps, elsewhere = np.ones((2, 2), np.int64), Path("elsewhere")
    assert small_index(root=elsewhere, stamps=stamps, bad={0: "why"}).fingerprint() == base
    pixels = np.zeros((2, 6, 8, 3), np.uint8)
    changed = [
        {"files": ["a.jpg", "c.jpg"]},
        {"files": ["a.jpgb.jpg", ""]},
        {"labels": np.array([-1, 0])},
        {"classes": ("dog",)},
        {"classes": ("cat", "dog")},
        {"sizes": np.array([[6, 8], [9, 6]], np.int32)},
        {"pixels": pixels},
        {"pixels": pixels + 1},
        {"pixels": pixels.reshape(2, 8, 6, 3)},
        {"presence": np.array([[1], [0]], np.int8)},
        {"presence": np.array([[1], [-1]], np.int8)},
    ]
    assert len({small_index(**change).fingerprint() for change in changed} | {base}) == len(changed) + 1


@pytest.fixture
def kept(index, tmp_path) -> Path:
    save_index(index, tmp_path / "index.npz")
    return tmp_path / "index.npz"


def test_load_index_gives_what_was_saved(index, tmp_path):
    presence = np.array([[1, 0], [-1, 1], [0, 0], [1, -1]], np.int8)
    index = replace(index, bad={1: "why\nso"}, labels=np.array([0, 0, 1, -1]), presence=presence)
    save_index(index, tmp_path / "new" / "index.npz")
    loaded = load_index(tmp_path / "new" / "index.npz")
    assert loaded.fingerprint() == index.fingerprint()
    assert loaded.root == index.root and loaded.bad == {1: "why so"}
    assert loaded.stamps.tolist() == index.stamps.tolist()
    assert loaded.folders == index.folders and list(index.folders) == ["", "cat", "dog"]
    assert os.listdir(tmp_path / "new") == ["index.npz"]


def test_within_makes_large_images_bad():
    index = small_index(sizes=np.array([[9999, 9999], [6, 9]], np.int32))
    assert index.within(100) is index
    (note,) = index.notes()
    for said in ("1 image of more", "takes 300 MB decoded (9999 x 9999)", "data.max_megapixels"):
        assert said in note
    small = index.within(50)
    assert small.bad == {0: "9999 x 9999 pixels, more than data.max_megapixels (50)"} and small.notes() == []
    assert small.sizes.tolist() == [[0, 0], [6, 9]] and small.contents() == index.within(50).contents()


@pytest.mark.parametrize("locks", [True, False])
def test_two_writers_of_one_file_leave_the_content_of_the_last(tmp_path, monkeypatch, locks):
    """Processes in two containers can have the same number, and a file system can have no locks."""
    path = tmp_path / "file"
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_lock)
    with atomic_files.replacing(path) as first, atomic_files.replacing(path) as second:
        first.write(b"first")
        second.write(b"second, which ends before")
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]


def test_next_write_removes_what_a_killed_one_left_and_nothing_else(tmp_path, monkeypatch):
    """On another machine, and without locks, nobody knows whether its writer lives."""
    path = tmp_path / "file"
    for name in ("file", "other"):
        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "try_to_remove", lambda path: None)
            patch.setattr(os, "replace", lambda *_: sys.exit("killed"))
            with pytest.raises(SystemExit):
                atomic_files.replace(tmp_path / name, b"half")
    assert len(os.listdir(tmp_path)) == 2
    for attribute, module, value in (("flock", fcntl, no_lock), ("_boot", atomic_files, lambda: b"another")):
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, value)
            atomic_files.replace(path, b"whole")
        assert len(os.listdir(tmp_path)) == 3
    with atomic_files.replacing(path) as stream:
        stream.write(b"whole")
        # An open file takes its room of the disk also without a name.
        names = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
        assert not any("(deleted)" in name and str(tmp_path) in name for name in names)
    left = set(os.listdir(tmp_path)) - {"file"}
    assert path.read_bytes() == b"whole" and len(left) == 1
    atomic_files.replace(tmp_path / "other", b"whole")
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]


def no_lock(*_) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_load_index_names_any_damage(kept, index):
    """Bytes exchanged anywhere, in the zip's own tables too, are a message with the remedy or do no harm."""
    whole, draws = kept.read_bytes(), np.random.default_rng(0)
    broken = [b"", whole[: len(whole) // 2], b"no zip file", whole.replace(b"dog/c.jpg", b"dog/d.jpg")]
    for _ in range(400):
        damaged = bytearray(whole)
        first = int(draws.integers(len(whole)))
        damaged[first : first + int(draws.integers(1, 5))] = draws.bytes(1)
        broken.append(bytes(damaged))
    for content in broken:
        kept.write_bytes(content)
        try:
            found = load_index(kept).fingerprint()
        except DataError as error:
            found = str(error)
        assert found == index.fingerprint() or "data check" in found
    kept.unlink()
    assert load_index(kept) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": np.array("something")}, "not an image index"),
        ({"kind": None}, "not an image index"),
        ({"version": np.array(99)}, "version 99"),
        ({"labels": None}, "labels"),
        ({"labels": np.array([1, 0, 1, 0])}, "fingerprint"),
        ({"bad": np.array([1, 2])}, "cannot be used"),
        ({"files": as_lines(["cat/a.jpg"])}, "cannot be used"),
        ({"folders": as_lines(["cat", "../.."])}, "cannot be used"),
        ({"folders": as_lines(["", "cat", "../.."])}, "leads out"),
        ({"shards": as_lines(["../a.tar"])}, "'../a.tar' leads out of the data folder"),
        ({"classes": np.array([Trap()], object)}, "cannot be read"),  # a pickle, which is not run
    ],
)
def test_load_index_refuses_exchanged_parts(kept, tmp_path, monkeypatch, changes, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=said):
        load_index(rewritten(kept, **changes))
    assert not Path("RAN").exists()


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "cat/../../secret.jpg"])
def test_load_index_refuses_names_outside_its_root(tmp_path, name):
    index = small_index(files=["a.jpg", name], stamps=np.zeros((2, 2), np.int64))
    save_index(index, tmp_path / "index.npz")
    with pytest.raises(DataError, match="leads out"):
        load_index(tmp_path / "index.npz")
