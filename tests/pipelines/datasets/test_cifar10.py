"""CIFAR-10 from its Python batches, its archive, a server and folders; and what must not be believed."""

import dataclasses
import hashlib
import http.server
import io
import os
import pickle
import tarfile
import threading

import numpy as np
import pytest

from pipelines.data_errors import DataError
from pipelines.datasets import cifar10 as module
from pipelines.datasets.cifar10 import CIFAR10, cifar10
from pipelines.datasets.cifar_batch import read_batch
from pipelines.datasets.download import download, sha256_of
from tests.pipelines.datasets.test_index import write_image

ARCHIVE, FOLDER, CLASSES = CIFAR10.archive, CIFAR10.folder, CIFAR10.classes
TRAIN, TEST = CIFAR10.train, CIFAR10.test
LIMITS = {"key": b"labels", "classes": 10, "largest": CIFAR10.largest}
ROWS = 6  # images in a batch of these tests; the format does not fix it


def batch_of(seed: int, rows: int = ROWS) -> dict:
    draws = np.random.default_rng(seed)
    pixels = draws.integers(0, 256, (rows, 3072), dtype=np.uint8)
    return {b"data": pixels, b"labels": draws.integers(0, 10, rows).tolist(), b"batch_label": b"of a test"}


def authors_pickle(
    data: np.ndarray, labels: list[int], dtype: bytes = b"u1", key: bytes = b"labels"
) -> bytes:
    """A batch as Python 2's NumPy wrote the authors' files: protocol 2, byte strings, the old module name."""

    def string(value: bytes) -> bytes:  # BINSTRING, which protocol 2 has and Python 3 reads but never writes
        return b"T" + len(value).to_bytes(4, "little") + value

    def integer(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    shape = integer(data.shape[0]) + integer(data.shape[1]) + b"\x86"
    element = b"cnumpy\ndtype\n(" + string(dtype) + integer(0) + integer(1) + b"tR("
    element += integer(3) + string(b"|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + integer(0) + b"\x85" + string(b"b")
    array += b"tR(" + integer(1) + shape + element + b"\x89" + string(data.tobytes()) + b"tb"
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(key) + numbers + b"u."


def write_batches(folder, rows: int = ROWS) -> dict[str, dict]:
    folder.mkdir(parents=True, exist_ok=True)
    batches = {name: batch_of(seed, rows) for seed, name in enumerate((*TRAIN, *TEST))}
    for name, batch in batches.items():
        (folder / name).write_bytes(authors_pickle(batch[b"data"], batch[b"labels"]))
    return batches


def write_archive(path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def trust(monkeypatch, path, **changes) -> None:
    """Lets a test's own archive pass for the authors'."""
    changes = {"sha256": sha256_of(path), "size": os.path.getsize(path), **changes}
    monkeypatch.setattr(module, "CIFAR10", dataclasses.replace(CIFAR10, **changes))


@pytest.fixture
def archive(tmp_path):
    batches = write_batches(tmp_path / "source")
    members = {"other/test_batch": b"!"}
    members |= {f"{FOLDER}/{name}": (tmp_path / "source" / name).read_bytes() for name in batches}
    members |= {f"{FOLDER}/readme.html": b"<html>", "../escaped": b"!", f"{FOLDER}/../../escaped": b"!"}
    write_archive(tmp_path / "made.tar.gz", members)
    return tmp_path / "made.tar.gz"


# -- Python batches


def test_the_authors_pickles_are_read_as_planes_of_red_green_and_blue(tmp_path):
    batch = batch_of(0)
    (tmp_path / "batch").write_bytes(authors_pickle(batch[b"data"], batch[b"labels"]))
    assert pickle.loads((tmp_path / "batch").read_bytes(), encoding="bytes")[b"labels"] == batch[b"labels"]
    pixels, labels = read_batch(tmp_path / "batch", **LIMITS)
    assert pixels.shape == (ROWS, 32, 32, 3) and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert labels.dtype == np.int64 and labels.tolist() == batch[b"labels"]
    for image, channel, row, column in [(0, 0, 0, 0), (2, 1, 3, 31), (5, 2, 31, 7)]:
        assert (
            pixels[image, row, column, channel] == batch[b"data"][image, channel * 1024 + row * 32 + column]
        )


@pytest.mark.parametrize("protocol", [3, 4])
def test_batches_pickled_anew_by_todays_numpy_are_read_too(tmp_path, protocol):
    batch = batch_of(1)
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol))
    pixels, labels = read_batch(tmp_path / "batch", **LIMITS)
    assert labels.tolist() == batch[b"labels"]
    assert np.array_equal(pixels.transpose(0, 3, 1, 2).reshape(ROWS, -1), batch[b"data"])


class Trap:
    """Pickles as a call of any function: what a hostile file would be."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Trap(os.system, "touch RAN"), "asks for posix.system"),
        (Trap(eval, "open('RAN', 'w')"), "asks for builtins.eval"),
        (Trap(getattr, "", "join"), "asks for builtins.getattr"),
        (Trap(np.load, "x"), "asks for numpy.load"),
        ({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, "instead of uint8"),
        ({b"data": np.array([[None]]), b"labels": [0]}, "instead of uint8"),
        ({b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]}, "pixels with"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, "pixels with"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]}, "labels from 0 to 10"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, "a"]}, "pixels with"),
        ({b"labels": [0]}, "KeyError"),
        ({b"data": b"\0" * 3072, b"labels": [0]}, "AttributeError"),
        ([], "TypeError"),
    ],
)
def test_a_pickle_that_is_no_batch_is_refused_and_runs_nothing(tmp_path, monkeypatch, value, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch").write_bytes(pickle.dumps(value, 3))
    with pytest.raises(DataError, match=said):
        read_batch(tmp_path / "batch", **LIMITS)
    assert not (tmp_path / "RAN").exists()


def test_a_batch_that_is_cut_off_or_far_too_large_is_refused(tmp_path):
    batch = batch_of(0)
    data = authors_pickle(batch[b"data"], batch[b"labels"])
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "batch").write_bytes(data[:cut])
        with pytest.raises(DataError, match="not a CIFAR batch"):
            read_batch(tmp_path / "batch", **LIMITS)
    (tmp_path / "batch").write_bytes(data)
    with pytest.raises(DataError, match="larger than any"):
        read_batch(tmp_path / "batch", **{**LIMITS, "largest": len(data) - 1})


@pytest.mark.parametrize("inside", ["", FOLDER])
def test_training_and_test_images_come_in_the_authors_order(tmp_path, inside):
    batches = write_batches(tmp_path / inside)
    train, test = cifar10(tmp_path), cifar10(tmp_path, train=False)
    assert train.labels.tolist() == [label for name in TRAIN for label in batches[name][b"labels"]]
    assert test.labels.tolist() == batches[TEST[0]][b"labels"]
    assert train.pixels.shape == (5 * ROWS, 32, 32, 3) and train.sizes.tolist() == [[32, 32]] * (5 * ROWS)
    assert train.root is None and train.classes == CLASSES
    assert (train.name(7), test.name(5)) == ("train/00007", "test/00005")


def test_a_missing_batch_is_named(tmp_path):
    write_batches(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(DataError, match="lacks data_batch_4"):
        cifar10(tmp_path)


# -- the archive


def test_the_archive_is_unpacked_by_name_and_nothing_else_in_it_is_written(archive, tmp_path, monkeypatch):
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    trust(monkeypatch, archive)
    os.rename(archive, root / ARCHIVE)
    assert len(cifar10(root, train=False)) == ROWS
    assert sorted(os.listdir(root / FOLDER)) == sorted((*TRAIN, *TEST))
    assert not list(tmp_path.rglob("escaped"))
    (root / ARCHIVE).unlink()
    assert len(cifar10(root)) == 5 * ROWS  # unpacked once


def test_an_archive_that_is_not_the_authors_is_refused_unopened(archive, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    os.rename(archive, root / ARCHIVE)
    with pytest.raises(DataError, match=r"is not CIFAR-10's archive: sha256 [0-9a-f]{64}, not 6d958be0"):
        cifar10(root)
    assert os.listdir(root) == [ARCHIVE]


def test_links_and_giants_in_an_archive_are_not_unpacked(archive, tmp_path, monkeypatch):
    path = tmp_path / "root" / ARCHIVE
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo(f"{FOLDER}/test_batch")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        giant = tarfile.TarInfo(f"{FOLDER}/data_batch_1")
        giant.size = 2000
        tar.addfile(giant, io.BytesIO(b"\0" * 2000))
    trust(monkeypatch, path, largest=1999)
    with pytest.raises(DataError, match=r"lacks .*data_batch_1.*test_batch"):
        cifar10(path.parent)
    assert os.listdir(path.parent / FOLDER) == []


# -- the download


@pytest.fixture
def server(tmp_path):
    """Serves one file from this machine; `ranges`, `stop_after` and `asked` steer and watch it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        content, ranges, stop_after, asked = b"", True, None, []

        def do_GET(self):
            wanted = self.headers.get("Range")
            self.asked.append(wanted)
            first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
            body = self.content[first:]
            self.send_response(206 if wanted and self.ranges else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: self.stop_after])

        def log_message(self, *_):
            """Keeps the test's output quiet."""

    http_server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    Handler.asked = []
    Handler.url = f"http://127.0.0.1:{http_server.server_port}/file"
    yield Handler
    http_server.shutdown()
    http_server.server_close()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_download_is_whole_verified_and_counted(server, tmp_path):
    server.content = os.urandom(3_000_000)
    told = []
    options = {
        "sha256": digest(server.content),
        "size": 3_000_000,
        "progress": lambda *count: told.append(count),
    }
    download(server.url, tmp_path / "new" / "file", **options)
    assert (tmp_path / "new" / "file").read_bytes() == server.content
    assert os.listdir(tmp_path / "new") == ["file"]
    assert told[-1] == (3_000_000, 3_000_000) and len(told) > 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_continued_or_where_the_server_cannot_begun_again(server, tmp_path, ranges):
    server.content, server.ranges, server.stop_after = os.urandom(3_000_000), ranges, 2_500_000
    options = {"sha256": digest(server.content), "size": 3_000_000}
    with pytest.raises(DataError, match="the same command again"):
        download(server.url, tmp_path / "file", **options)
    assert os.listdir(tmp_path) == ["file.part"]
    server.stop_after = None
    download(server.url, tmp_path / "file", **options)
    assert server.asked == [None, "bytes=2500000-"]
    assert (tmp_path / "file").read_bytes() == server.content and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("sent", [b"x" * 100, b"x" * 101, b"x" * 5_000_000], ids=len)
def test_another_file_than_expected_is_deleted(server, tmp_path, sent):
    server.content = sent
    told = []
    with pytest.raises(DataError, match="sent another file"):
        download(
            server.url,
            tmp_path / "file",
            sha256=digest(b"y" * 100),
            size=100,
            progress=lambda *count: told.append(count),
        )
    assert os.listdir(tmp_path) == []
    assert told == [(100, 100)]  # however much is sent, one block shows that it is too much


def test_a_whole_but_unnamed_download_is_verified_and_not_fetched_again(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"y" * 100)
    download(server.url, tmp_path / "file", sha256=digest(b"y" * 100), size=100)
    assert server.asked == [] and (tmp_path / "file").exists()


def test_a_server_that_cannot_be_reached_is_named_with_the_way_round(tmp_path):
    with pytest.raises(DataError, match=r"cannot download http://127.0.0.1:1/file to .*other means"):
        download("http://127.0.0.1:1/file", tmp_path / "file", sha256="", size=1)


def test_cifar10_is_downloaded_only_when_asked(server, archive, tmp_path, monkeypatch):
    server.content = archive.read_bytes()
    server.url = server.url.replace("/file", f"/{ARCHIVE}")
    trust(monkeypatch, archive, url=server.url)
    with pytest.raises(DataError, match=r"no CIFAR-10 under .*data.download"):
        cifar10(tmp_path / "root")
    assert server.asked == []
    assert len(cifar10(tmp_path / "root", download=True)) == 5 * ROWS
    assert len(cifar10(tmp_path / "root", train=False, download=True)) == ROWS
    assert len(server.asked) == 1


# -- folders


def test_folders_of_images_are_held_in_memory_or_left_as_files(tmp_path):
    for name in CLASSES:
        write_image(tmp_path / "train" / name / "1.jpg", 32, 32)
        write_image(tmp_path / "test" / name / "7.jpg", 32, 32)
    train, files = cifar10(tmp_path), cifar10(tmp_path, resident=False)
    assert train.pixels.shape == (10, 32, 32, 3) and files.pixels is None
    assert train.classes == CLASSES and train.labels.tolist() == list(range(10))
    assert files.path(3) == tmp_path / "train" / "cat" / "1.jpg"
    assert cifar10(tmp_path, train=False).name(0) == "airplane/7.jpg"


def test_folders_of_other_classes_are_not_cifar10(tmp_path):
    write_image(tmp_path / "train" / "zebra" / "1.jpg", 32, 32)
    with pytest.raises(DataError, match="other class folders than CIFAR-10: zebra"):
        cifar10(tmp_path)
