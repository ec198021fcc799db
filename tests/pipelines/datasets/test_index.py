"""The index of a data set: a table of names, headers of many files, and a file verified when it is read."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.folders import image_folder
from pipelines.datasets.image_headers import file_stamps, image_size, read_headers
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.index_io import load_index, save_index
from pipelines.datasets.string_table import Names, leaves_root

words = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=12)


def write_image(path: Path, width: int = 8, height: int = 6, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, width in {"cat/a.jpg": 8, "cat/b.png": 9, "dog/a.jpg": 10, "dog/c.jpg": 11}.items():
        write_image(tmp_path / "images" / name, width)
    return tmp_path / "images"


@pytest.fixture
def index(folder) -> ImageIndex:
    return image_folder(folder)


def small_index(**changes) -> ImageIndex:
    parts = {
        "root": Path("somewhere"),
        "files": ["a.jpg", "b.jpg"],
        "labels": np.array([0, -1]),
        "classes": ("cat",),
        "sizes": np.array([[6, 8], [6, 9]], np.int32),
    }
    return ImageIndex(**(parts | changes))


# -- names


@settings(max_examples=100, deadline=None)
@given(st.lists(words, max_size=30))
def test_names_behave_like_the_list_they_were_made_of(names):
    packed = Names.of(names)
    assert len(packed) == len(names)
    assert list(packed) == names == [packed[i] for i in range(len(names))] == packed[:]
    assert [packed[-i] for i in range(1, len(names) + 1)] == names[::-1]
    assert packed[1:-1:2] == names[1:-1:2]
    assert list(Names(packed.lines)) == names
    for outside in (len(names), -len(names) - 1):
        with pytest.raises(IndexError):
            packed[outside]


def test_names_iterate_across_chunks(monkeypatch):
    monkeypatch.setattr("pipelines.datasets.string_table._CHUNK", 3)
    for count in (0, 1, 2, 3, 4, 6, 7):
        names = [f"n{i}" for i in range(count)]
        assert list(Names.of(names)) == names


def test_names_find_gives_positions_or_minus_one():
    names = Names.of(["b", "a", "d", "c"])
    assert names.find(["c", "x", "b", "c"]).tolist() == [3, -1, 0, 3]
    assert names.find([]).shape == (0,)


@pytest.mark.parametrize("name", ["two\nlines", "two\rlines", os.fsdecode(b"caf\xe9.jpg")])
def test_names_refuse_line_breaks_and_other_encodings(name):
    with pytest.raises(DataError, match="rename"):
        Names.of(["good", name])


def test_names_refuse_cut_off_lines():
    with pytest.raises(DataError, match="cut off"):
        Names(Names.of(["one", "two"]).lines[:-1])


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("a/b.jpg", False),
        ("..a/b..jpg", False),
        ("../a", True),
        ("a/../../b", True),
        ("/a", True),
        ("a/..", True),
    ],
)
def test_leaves_root(name, leaves):
    assert leaves_root(name) is leaves


# -- headers


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "tif"])
def test_image_size_is_height_then_width_as_stored(tmp_path, suffix):
    rotated = Image.Exif()
    rotated[0x0112] = 6
    options = {"exif": rotated} if suffix == "jpg" else {}
    assert image_size(write_image(tmp_path / f"a.{suffix}", 13, 7, **options)) == (7, 13)


def bad_files(folder: Path) -> dict[str, str]:
    """Write files that cannot be used as images; return name -> a part of the reason."""
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (4, 4)).save(folder / "gif.jpg", format="GIF")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("<html>404 Not Found</html>")
    (folder / "noise.jpg").write_bytes(np.random.default_rng(0).bytes(500))
    jpeg = write_image(folder / "head.jpg", 64, 64).read_bytes()
    (folder / "head.jpg").write_bytes(jpeg[:20])
    Image.new("1", (20000, 20000)).save(folder / "bomb.png")
    Image.new("1", (11000, 10000)).save(folder / "large.png")
    return {
        "gif.jpg": "a GIF",
        "empty.jpg": "empty",
        "text.jpg": "not an image",
        "noise.jpg": "not an image",
        "head.jpg": "",
        "bomb.png": "more than 100 megapixels",
        "large.png": "11000 x 10000 pixels, more than 100 megapixels",
        "missing.jpg": "no such file",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_read_headers_lists_unusable_files_with_reasons(tmp_path):
    reasons = bad_files(tmp_path)
    write_image(tmp_path / "good.jpg", 5, 4)
    names = [*reasons, "good.jpg"]
    headers = read_headers(tmp_path, names)
    assert list(headers.bad) == list(range(len(reasons)))
    for row, name in enumerate(reasons):
        assert reasons[name] in headers.bad[row], name
    assert headers.sizes.tolist() == [[0, 0]] * len(reasons) + [[4, 5]]
    assert headers.stamps[-2].tolist() == [-1, -1]
    assert headers.stamps.tolist() == file_stamps(tmp_path, names).tolist()


def test_read_headers_of_many_chunks_land_in_their_rows(tmp_path):
    names = []
    for i in range(600):  # more than two chunks
        names.append(f"{i}.bmp")
        Image.new("L", (1 + i % 7, 1 + i % 5)).save(tmp_path / names[-1])
    headers = read_headers(tmp_path, names)
    assert headers.sizes.tolist() == [[1 + i % 5, 1 + i % 7] for i in range(600)]
    assert headers.stamps[:, 0].tolist() == [os.path.getsize(tmp_path / name) for name in names]


def test_read_headers_lists_bad_files_in_order(tmp_path, monkeypatch):
    def slow_at_first(path, max_pixels):
        if path.endswith("/0"):
            time.sleep(0.1)
        raise ValueError("bad")

    monkeypatch.setattr("pipelines.datasets.image_headers.image_size", slow_at_first)
    assert list(read_headers(tmp_path, [str(i) for i in range(600)]).bad) == list(range(600))


# -- the index


def test_index_names_and_paths(index, folder):
    assert len(index) == 4
    assert [index.name(i) for i in range(4)] == ["cat/a.jpg", "cat/b.png", "dog/a.jpg", "dog/c.jpg"]
    assert index.path(3) == folder / "dog" / "c.jpg"


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": np.array([0])},
        {"labels": np.array([0, 1])},
        {"labels": np.array([0, -2])},
        {"labels": np.array([0, 0], np.int32)},
        {"sizes": np.zeros((2, 2))},
        {"sizes": np.zeros((2, 3), np.int32)},
        {"stamps": np.zeros((1, 2), np.int64)},
        {"pixels": np.zeros((3, 4, 4, 3), np.uint8)},
        {"pixels": np.zeros((2, 4, 4, 1), np.uint8)},
        {"pixels": np.zeros((2, 4, 4, 3), np.float32)},
        {"bad": {2: "why"}},
        {"bad": {-1: "why"}},
    ],
)
def test_index_refuses_parts_that_do_not_fit(changes):
    with pytest.raises(DataError):
        small_index(**changes)


def test_index_in_memory_has_names_but_no_paths():
    index = small_index(root=None, pixels=np.zeros((2, 6, 8, 3), np.uint8))
    assert index.name(1) == "b.jpg"
    with pytest.raises(DataError, match="held in memory"):
        index.path(1)


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
    ]
    assert len({small_index(**change).fingerprint() for change in changed} | {base}) == len(changed) + 1


def test_require_good_names_all_bad_images():
    index = small_index(bad={1: "cut off"})
    index.require_good(1)
    with pytest.raises(BadImage) as error:
        index.require_good()
    assert error.value.files == [("somewhere/b.jpg", "cut off")]


# -- on disk


def test_load_index_gives_what_was_saved(index, tmp_path):
    index = replace(index, bad={1: "why\nso"}, labels=np.array([0, 0, 1, -1]))
    save_index(index, tmp_path / "new" / "index.npz")
    loaded = load_index(tmp_path / "new" / "index.npz")
    assert loaded.fingerprint() == index.fingerprint()
    assert loaded.root == index.root and loaded.bad == {1: "why so"}
    assert loaded.stamps.tolist() == index.stamps.tolist()
    assert os.listdir(tmp_path / "new") == ["index.npz"]


def test_load_index_follows_moved_data(index, folder, tmp_path):
    save_index(index, tmp_path / "index.npz")
    moved = folder.rename(tmp_path / "moved")
    assert load_index(tmp_path / "index.npz", root=moved).path(0).exists()
    with pytest.raises(
        DataError, match=r"4 of the 4 files .*found under .*images: cat/a.jpg, cat/b.png, dog/a.jpg, \.\.\."
    ):
        load_index(tmp_path / "index.npz")
    assert len(load_index(tmp_path / "index.npz", refresh=False)) == 4


def test_load_index_reads_only_changed_files_again(index, folder, tmp_path, monkeypatch):
    save_index(index, tmp_path / "index.npz")
    write_image(folder / "cat" / "b.png", 20, 30)
    (folder / "dog" / "a.jpg").write_bytes(b"<html>")
    read = []

    def watched(root, names):
        read.extend(names)
        return read_headers(root, names)

    monkeypatch.setattr("pipelines.datasets.index.read_headers", watched)
    loaded = load_index(tmp_path / "index.npz")
    assert read == ["cat/b.png", "dog/a.jpg"]
    assert loaded.sizes.tolist() == [[6, 8], [30, 20], [0, 0], [6, 11]]
    assert list(loaded.bad) == [2] and "not an image" in loaded.bad[2]
    assert index.refreshed().sizes.tolist() == loaded.sizes.tolist()
    assert index.sizes[1].tolist() == [6, 9] and index.bad == {}  # a new index, the old one as it was
    read.clear()
    save_index(loaded, tmp_path / "index.npz")
    assert load_index(tmp_path / "index.npz").bad == loaded.bad
    assert read == []
    # Repaired: good again, without anybody clearing a list.
    write_image(folder / "dog" / "a.jpg", 10)
    assert load_index(tmp_path / "index.npz").bad == {}


def test_refreshed_compares_the_modification_time(index, folder, tmp_path):
    bad = replace(index, bad={0: "decoder says no", 2: "decoder says no"})
    path = folder / "cat" / "a.jpg"
    os.utime(path, ns=(0, 1))
    assert bad.refreshed().bad == {2: "decoder says no"}


def test_refreshed_returns_an_unchanged_index_itself(index, folder):
    assert index.refreshed() is index
    resident = small_index(root=None)
    assert resident.refreshed() is resident
    # A file that was missing from the start stays a bad image.
    stamps = index.stamps.copy()
    stamps[0] = -1
    (folder / "cat" / "a.jpg").unlink()
    lacking = replace(index, stamps=stamps, bad={0: "no such file"})
    assert lacking.refreshed() is lacking


@pytest.mark.parametrize("changes", [{"stamps": None}, {"root": None, "stamps": np.zeros((2, 2), np.int64)}])
def test_save_index_refuses_data_in_memory(tmp_path, changes):
    with pytest.raises(DataError, match="in memory"):
        save_index(small_index(**changes), tmp_path / "index.npz")


def test_save_index_leaves_the_old_one_when_it_fails(index, tmp_path, monkeypatch):
    path = tmp_path / "index.npz"
    save_index(index, path)

    def full(stream, **arrays):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipelines.datasets.index_io.np.savez", full)
    with pytest.raises(DataError, match=r"cannot write the index .*index.npz: No space left on device"):
        save_index(replace(index, bad={0: "why"}), path)
    assert load_index(path).bad == {} and sorted(os.listdir(tmp_path)) == ["images", "index.npz"]


def test_save_index_syncs_before_the_rename(index, tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), rename(a, b)))
    save_index(index, tmp_path / "index.npz")
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:1000] + b"\0" * 20 + data[1020:],
        lambda data: b"not a zip file at all",
        lambda data: data.replace(b"dog/c.jpg", b"dog/d.jpg"),
    ],
)
def test_load_index_refuses_damage_with_the_remedy(index, tmp_path, damage):
    path = tmp_path / "index.npz"
    with pytest.raises(DataError, match=r"no index .*index.npz: .*data check"):
        load_index(path)
    save_index(index, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="data check"):
        load_index(path)


def rewritten(path: Path, **changes) -> Path:
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": np.array("something")}, "not an image index"),
        ({"kind": None}, "not an image index"),
        ({"version": np.array(99)}, "version 99"),
        ({"labels": None}, "labels"),
        ({"labels": np.array([1, 0, 1, 0])}, "fingerprint"),
        ({"bad": np.array([1, 2])}, "damaged"),
        ({"files": Names.of(["cat/a.jpg"]).lines}, "damaged"),
    ],
)
def test_load_index_refuses_exchanged_parts(index, tmp_path, changes, said):
    save_index(index, tmp_path / "index.npz")
    with pytest.raises(DataError, match=said):
        load_index(rewritten(tmp_path / "index.npz", **changes))


def test_load_index_does_not_run_a_pickle(index, tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    save_index(index, tmp_path / "index.npz")
    with pytest.raises(DataError, match="cannot be read"):
        load_index(rewritten(tmp_path / "index.npz", classes=np.array([Trap()], object)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "cat/../../secret.jpg"])
def test_load_index_refuses_names_outside_its_root(tmp_path, name):
    stamps = np.zeros((2, 2), np.int64)
    save_index(small_index(files=["a.jpg", name], stamps=stamps), tmp_path / "index.npz")
    with pytest.raises(DataError, match="leads out"):
        load_index(tmp_path / "index.npz", refresh=False)
