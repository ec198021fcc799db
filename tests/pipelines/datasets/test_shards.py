"""A pack is the files it was made of: the same pixels to the bit, a kill that costs nothing, damage by its name."""

import copy
import errno
import os
import pickle
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastsuncet import cli
from fastsuncet.commands.data_check import check_config
from fastsuncet.config import load_config
from fastsuncet.data.dataset import index_path, open_images
from fastsuncet.distributed.launch import join
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets import shard_writer as packing
from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.shard_writer import write_pack
from pipelines.datasets.shards import HEADER, open_pack
from pipelines.verify import check
from tests.pipelines.test_verify import both_decoders, cut_short
from tests.support.pictures import write_kinds, write_pictures
from tests.support.streams import BACKENDS, assert_same, labeled, opened, unlabeled

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def index(tmp_path) -> ImageIndex:
    return write_pictures(tmp_path / "images", count=12, side=40)


@pytest.fixture
def pack(index, tmp_path) -> Path:
    path = tmp_path / "images.pack"
    assert write_pack(index, path) == 0
    return path


def damage(path: Path, offset: int, byte: int = 0x40) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= byte
    path.write_bytes(content)


# -- what comes out


@pytest.mark.parametrize("reader", BACKENDS)
def test_training_views_from_a_pack_are_those_from_the_files_to_the_bit(tmp_path, reader):
    write_pictures(tmp_path / "images", count=12, side=40)
    index = write_kinds(tmp_path / "images", 50, 60)  # colour, grey, CMYK, progressive, rotated, PNG
    write_pack(index, tmp_path / "images.pack")
    packed = open_pack(tmp_path / "images.pack")
    for plan_of in (unlabeled, lambda images: labeled(images, np.arange(len(images)))):
        files, pack = (opened(plan_of(images), reader) for images in (index, packed))
        for step in (0, 1, 7):
            assert_same(files(step), pack(step))
            assert (files.visit(step).labels == pack.visit(step).labels).all()


def test_a_pack_holds_the_index_and_every_byte_of_every_file(index, pack):
    packed = open_pack(pack, like=index)
    assert packed.fingerprint() == index.fingerprint() and packed.root == pack
    for i in range(len(index)):
        assert packed.content(i) == index.path(i).read_bytes()
        assert packed.damage(i) is None
    assert packed.refreshed() is packed
    assert not list(pack.parent.glob("*.part*"))


def test_bytes_are_asked_for_ahead_and_come_in_the_order_asked(index, pack):
    rows = np.array([7, 2, 7, 11])
    fetched = open_pack(pack).pack.fetch(rows)
    assert [row.tobytes() for row in fetched] == [index.path(i).read_bytes() for i in rows]


def test_bad_images_keep_their_numbers_and_reasons_without_bytes(tmp_path, index):
    index.path(4).write_bytes(b"no image")
    scanned = image_folder(index.root)
    write_pack(scanned, tmp_path / "bad.pack")
    packed = open_pack(tmp_path / "bad.pack", like=scanned)
    assert packed.bad == scanned.bad and list(packed.bad) == [4]
    assert packed.content(4) == b"" and packed.content(5) == index.path(5).read_bytes()


# -- a kill while writing


def test_a_killed_packing_continues_where_the_disk_has_it_and_ends_in_the_same_bytes(tmp_path, index, pack):
    stopped = tmp_path / "stopped.pack"
    script = f"""
import os, signal
from pipelines import packing
from pipelines.datasets import image_folder
packing.BLOCK = packing.FLUSH = 1
def kill(done, total):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
packing.write_pack(image_folder({str(index.root)!r}), {str(stopped)!r}, progress=kill)
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not stopped.exists() and Path(f"{stopped}.part").exists()
    reads = []
    told = write_pack(index, stopped, progress=lambda *count: reads.append(count))
    assert told == 5 and reads == [(12, 12)]
    assert stopped.read_bytes() == pack.read_bytes()


def interrupted(index, path, done: int) -> Path:
    """A packing that stopped after `done` images; returns its FILE.part."""

    def stop(count, total):
        if count == done:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", 1)
        patch.setattr(packing, "FLUSH", 1)
        with pytest.raises(KeyboardInterrupt):
            write_pack(index, path, progress=stop)
    return path.with_name(path.name + ".part")


@pytest.mark.parametrize("harm", ["torn row", "lost bytes", "flipped row", "half an image"])
def test_what_a_power_cut_lost_is_packed_again(tmp_path, index, pack, harm):
    path = tmp_path / "cut.pack"
    part = interrupted(index, path, 6)
    log = part.with_name(part.name + ".log")
    if harm == "torn row":
        os.truncate(log, log.stat().st_size - 3)
    elif harm == "lost bytes":
        os.truncate(part, part.stat().st_size - 10)
    elif harm == "flipped row":
        damage(log, log.stat().st_size - 6)  # of the checksum
    else:
        with open(part, "ab") as stream:
            stream.write(b"half an image")
    assert write_pack(index, path) == (6 if harm == "half an image" else 5)
    assert path.read_bytes() == pack.read_bytes()


def test_a_start_on_changed_files_takes_nothing_over(tmp_path, index):
    path = tmp_path / "cut.pack"
    interrupted(index, path, 6)
    index.path(0).write_bytes(index.path(1).read_bytes())
    changed = image_folder(index.root)
    assert write_pack(changed, path) == 0
    assert open_pack(path).content(0) == index.path(1).read_bytes()


def test_a_disk_too_small_for_a_pack_is_told_in_a_unit_that_shows_it(tmp_path, index, monkeypatch):
    big = replace(index, stamps=np.array([[44_000_000, 0]] * len(index)))
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: SimpleNamespace(free=3e5))
    with pytest.raises(DataError, match=f"needs {44 * len(index):.1f} MB more, and its disk has 0.3 MB left"):
        write_pack(big, tmp_path / "images.pack")
    huge = replace(index, stamps=np.array([[10**12, 0]] * len(index)))
    with pytest.raises(DataError, match=rf"needs {len(index)},000.0 GB more, and its disk has 0.0 GB left"):
        write_pack(huge, tmp_path / "images.pack")


def test_two_writers_are_told_from_one_another(tmp_path, index):
    path = tmp_path / "two.pack"

    def second(done, total):
        with pytest.raises(DataError, match=r"another process is writing .*two\.pack\.part"):
            write_pack(index, path)

    write_pack(index, path, progress=second)


def test_packing_again_does_nothing_and_never_overwrites_anything_else(tmp_path, index, pack):
    before = pack.stat().st_mtime_ns
    assert write_pack(index, pack) == len(index) and pack.stat().st_mtime_ns == before
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="not a pack of images"):
        write_pack(index, tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_files_that_are_gone_or_have_changed_end_the_packing_by_name(tmp_path, index):
    name = index.name(3)
    index.path(3).write_bytes(b"longer or shorter")
    with pytest.raises(DataError, match=rf"{name} has changed since its index was made"):
        write_pack(index, tmp_path / "a.pack")
    index.path(3).unlink()
    with pytest.raises(DataError, match=rf"{name} cannot be packed: No such file"):
        write_pack(index, tmp_path / "a.pack")
    assert not (tmp_path / "a.pack").exists()


# -- damage


def test_a_truncated_pack_is_named_at_any_length(pack):
    whole = pack.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, HEADER, HEADER - 1, 30):
        pack.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"images\.pack is truncated"):
            open_pack(pack)
    for length in (10, 0):
        pack.write_bytes(whole[:length])
        with pytest.raises(DataError, match="not a pack"):
            open_pack(pack)


def test_a_flipped_bit_in_header_or_table_is_found_at_the_opening(pack):
    size = pack.stat().st_size
    for offset, part in ((26, "header"), (40, "header"), (size - 5, "table"), (size - 2000, "table")):
        damage(pack, offset)
        with pytest.raises(DataError, match=f"damaged: the checksum of its {part}"):
            open_pack(pack)
        damage(pack, offset)
    open_pack(pack)


@both_decoders
def test_the_check_finds_a_flipped_bit_that_any_decoder_forgives(index, pack, backend):
    good = open_pack(pack)
    assert check(good, backend).bad == []
    offset = int(good.pack.offsets[8] + good.pack.lengths[8] // 2)
    damage(pack, offset, 1)
    ((path, reason),) = check(open_pack(pack), backend).bad
    assert path == f"{pack}/{index.name(8)}" and "its checksum is another" in reason


def test_a_pack_of_other_images_is_refused_and_the_first_that_differs_named(index, pack, tmp_path):
    relabeled = replace(index, labels=np.where(np.arange(12) == 9, 0, index.labels))
    with pytest.raises(DataError, match=rf"other images than the index: image 9 is {index.name(9)}"):
        open_pack(pack, like=relabeled)
    write_pictures(tmp_path / "images", count=13, side=40)
    with pytest.raises(DataError, match="other images than the index"):
        open_pack(pack, like=image_folder(index.root))


@pytest.mark.parametrize("reader", BACKENDS)
def test_a_pack_that_is_cut_short_under_a_run_ends_it_by_the_packs_name(index, pack, reader):
    packed = open_pack(pack)
    loader = opened(unlabeled(packed, batch=12), reader, bad_images=12, prefetch=1)
    loader(0)
    os.truncate(pack, int(packed.pack.offsets[6]))
    # No image is bad: none is to be replaced, however many are allowed to be.
    with pytest.raises(
        DataError, match=r"images\.pack was cut short while it was in use: .* bytes"
    ) as caught:
        [loader(step) for step in range(1, 4)]
    assert not isinstance(caught.value, BadImage) and not loader.replaced


def test_a_read_that_comes_in_pieces_is_read_to_its_end_and_one_that_fails_is_named(index, pack, monkeypatch):
    packed, whole, pread = open_pack(pack), index.path(3).read_bytes(), os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, start: pread(file, min(length, 100), start))
    assert len(whole) > 250 and packed.content(3) == whole

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(DataError, match=r"images\.pack cannot be read: Input/output error"):
        packed.content(3)


def test_a_pack_closes_its_file_with_its_last_user(pack):
    packed = open_pack(pack)
    descriptor = packed.pack.descriptor
    os.fstat(descriptor)
    del packed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pack_is_not_copied_into_a_number_that_may_be_another_files(pack, copied):
    with pytest.raises(TypeError, match=r"neither copied nor pickled: open .* again"):
        copied(open_pack(pack).pack)


@pytest.mark.parametrize("reader", BACKENDS)
def test_a_damaged_image_in_training_is_named_and_replaced_where_allowed(index, pack, reader):
    packed = open_pack(pack)
    start = int(packed.pack.offsets[5])
    content = bytearray(pack.read_bytes())
    content[start : start + 200] = bytes(200)
    pack.write_bytes(content)
    packed = open_pack(pack)
    loader = opened(unlabeled(packed, batch=12), reader)
    with pytest.raises(BadImage, match=r"images\.pack/.*image.*its checksum is another"):
        loader(0)
    loader = opened(unlabeled(packed, batch=12), reader, bad_images=1)
    assert all(torch.isfinite(view).all() for view in loader(0))
    assert list(loader.replaced) == [5]


def test_an_image_that_was_bad_before_it_was_packed_has_the_reason_of_a_file(index, tmp_path):
    cut_short(index.path(2))
    write_pack(image_folder(index.root), tmp_path / "cut.pack")
    report = check(open_pack(tmp_path / "cut.pack"), "torchvision")
    assert report.index.bad == {2: "a truncated JPEG: its end is missing"}


# -- the commands

CONFIG = """\
data: {kind: image_folder, root: ., train: images, validation: null, backend: torchvision}
criterion: {temperature: 0.1, unsupervised_batch_size: 2}
optimization: {epochs: 1, lr: 1.0}
"""


@pytest.fixture
def here(index, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def images_of(*overrides):
    with join("cpu") as place:
        return open_images(load_config("run.yaml", overrides), place, validation=False)


def test_the_command_packs_and_a_run_reads_the_pack_alone(here, index, capsys):
    files = images_of()
    assert cli.main(["data", "pack", "run.yaml", "--output", "a.pack"]) == 0
    assert "12 images of images packed" in capsys.readouterr().out
    assert cli.main(["data", "pack", "run.yaml", "data.pack=a.pack"]) == 0
    assert "there already, whole" in capsys.readouterr().out
    index_path(load_config("run.yaml"), here / "images", True).unlink()
    (here / "images").rename(here / "elsewhere")
    packed = images_of("data.pack=a.pack")
    assert packed.fingerprint() == files.fingerprint()
    assert zlib.crc32(packed.train.content(0)) == packed.train.pack.checksums[0]
    assert (
        load_config("run.yaml", ["data.pack=a.pack"]).changed_keys(load_config("run.yaml").canonical()) == []
    )


def test_the_check_of_a_config_with_a_pack_reads_the_pack(here):
    assert cli.main(["data", "pack", "run.yaml", "--output", "a.pack"]) == 0
    lines = []
    config = load_config("run.yaml", ["data.pack=a.pack"])
    check_config(config, lines.append)
    assert lines == ["a.pack: 12 images decoded with PIL, all good"]
    damage(here / "a.pack", HEADER + 300, 1)
    with pytest.raises(BadImage, match=r"a\.pack/.*its checksum is another"):
        check_config(config, lines.append)


def test_what_is_wrong_ends_with_its_code(here, capsys):
    def told(*arguments) -> tuple[int, str]:
        return cli.main(["data", *arguments]), capsys.readouterr().err

    code, words = told("pack", "run.yaml")
    assert code == 2 and "--output is needed" in words
    code, words = told("pack", str(ROOT / "configs/digits_demo.yaml"), "--output", "d.pack")
    assert code == 2 and "in memory already" in words
    code, words = told("check", "run.yaml", "data.pack=none.pack")
    assert code == 3 and "there is no pack none.pack" in words
    assert told("pack", "run.yaml", "--output", "a.pack")[0] == 0
    os.truncate("a.pack", 9000)
    code, words = told("check", "run.yaml", "data.pack=a.pack")
    assert code == 3 and "a.pack is truncated: 9,000 of its" in words


def test_a_pack_of_other_images_than_the_kept_index_ends_a_run(here):
    images_of()
    assert cli.main(["data", "pack", "run.yaml", "--output", "a.pack"]) == 0
    write_pictures(here / "images", count=14, side=40)
    index_path(load_config("run.yaml"), here / "images", True).unlink()
    images_of()
    with pytest.raises(DataError, match="other images than the index"):
        images_of("data.pack=a.pack")
