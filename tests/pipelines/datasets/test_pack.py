"""A pack has the same pixels as its files to the bit, loses nothing to a kill, and names what is damaged."""

import os
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from fastsuncet import cli
from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.image_files import index_path, kept_index
from pipelines.data_errors import BadImage, CannotWrite, DataError
from pipelines.datasets import pack as module
from pipelines.datasets.csv_labels import with_csv_labels
from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex, load_index, save_index
from pipelines.datasets.label_splits import named
from pipelines.datasets.pack import INDEX, open_pack, write_pack
from pipelines.datasets.shards import scan_shard
from pipelines.verify import check
from tests.support.archives import tar_of
from tests.support.colors import ALONE
from tests.support.pictures import cut_short, write_kinds, write_pictures
from tests.support.streams import assert_same, labeled, opened, unlabeled


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 16_000)
    monkeypatch.setattr(module, "BLOCK", 2)


@pytest.fixture
def index(tmp_path) -> ImageIndex:
    return write_pictures(tmp_path / "images", count=12, side=40)


@pytest.fixture
def pack(index, tmp_path) -> Path:
    folder = tmp_path / "pack"
    assert write_pack(index, folder) == 0
    assert len(list(folder.glob("*.tar"))) > 2
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def place(index: ImageIndex, i: int) -> tuple[Path, int, int]:
    """Return the shard of an image, and its offset and length there."""
    shard, offset, length, _ = index.pack.members[i].item()
    return index.pack.paths[shard], offset, length


def damage(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)


def test_views_from_a_pack_equal_those_from_files(tmp_path, reader):
    write_pictures(tmp_path / "images", count=12, side=40)
    index = write_kinds(tmp_path / "images", 50, 60)  # color, gray, CMYK, progressive, rotated, PNG
    write_pack(index, tmp_path / "pack")
    packed = open_pack(tmp_path / "pack")
    for plan_of in (unlabeled, lambda images: labeled(images, np.arange(len(images)))):
        files, pack = (opened(plan_of(images), reader) for images in (index, packed))
        for step in (0, 1, 7):
            assert_same(files(step), pack(step))
            assert (files.draws(step).labels == pack.draws(step).labels).all()


def test_a_pack_can_be_read_by_other_programs(index, pack, tmp_path):
    """Its shards are WebDataset's: KEY.jpg and KEY.cls side by side, which also load without the index."""
    with tarfile.open(pack / "000000.tar") as tar:
        assert tar.getnames()[:4] == ["00000000.jpg", "00000000.cls", "00000001.jpg", "00000001.cls"]
        assert tar.extractfile("00000001.jpg").read() == index.path(1).read_bytes()
    (pack / INDEX).unlink()
    foreign = open_pack(pack)
    assert foreign.labels.tolist() == index.labels.tolist()
    assert foreign.sizes.tolist() == index.sizes.tolist()
    assert foreign.name(1) == "000000.tar/00000001.jpg" and foreign.damage(1) is None
    for refuse, lines in ((named, "a/1.jpg\n"), (with_csv_labels, "file,label\na/1.jpg,cat\n")):
        (tmp_path / "list").write_text(lines)
        with pytest.raises(DataError, match=rf"first image of the pack {pack} is called {foreign.name(0)}"):
            refuse(foreign, tmp_path / "list")
    shard, offset, _ = place(foreign, 1)
    damage(shard, offset)
    assert "its checksum is another" in open_pack(pack).damage(1)


def test_bad_images_keep_their_numbers_without_bytes(tmp_path, index):
    cut_short(index.path(2))
    index.path(4).write_bytes(b"no image")
    scanned = image_folder(index.root)
    write_pack(scanned, tmp_path / "bad")
    packed = open_pack(tmp_path / "bad", like=scanned)
    assert packed.bad == scanned.bad and list(packed.bad) == [4]
    assert packed.content(4) == b"" and packed.content(5) == index.path(5).read_bytes()
    assert packed.contents() == scanned.contents()  # a run can go on with either
    reason = "a truncated JPEG: its end is missing"  # as of a file
    assert check(packed, "torchvision").bad == {2: reason, 4: scanned.bad[4]}


@pytest.fixture
def part(index, tmp_path, monkeypatch) -> Path:
    """The FOLDER.part-HASH of a packing into `cut` that was stopped at its end (test_faults.py: at every call)."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_pack(index, tmp_path / "cut")
    (folder,) = tmp_path.glob("cut.part-*")
    return folder


@pytest.mark.parametrize(
    "harm",
    [
        lambda shard: os.truncate(shard, shard.stat().st_size // 2),
        lambda shard: shard.write_bytes((shard.parent / "000000.tar").read_bytes()),
        Path.unlink,
    ],
    ids=["lost bytes", "exchanged", "gone"],
)
def test_a_shard_that_a_power_cut_damaged_is_written_again(index, pack, part, harm, monkeypatch):
    harm(part / "000001.tar")
    shards, calls = [place(open_pack(pack), i)[0].name for i in range(12)], []
    monkeypatch.setattr(module, "show_progress", lambda what, *count: calls.append(count))
    assert write_pack(index, part.parent / "cut") == 12 - shards.count("000001.tar")
    assert calls == sorted(calls) and calls[-1] == (12, 12)
    assert contents(part.parent / "cut") == contents(pack) and not part.exists()


def test_a_packing_of_changed_files_starts_anew(tmp_path, index, part):
    index.path(0).write_bytes(index.path(1).read_bytes())
    assert write_pack(image_folder(index.root), tmp_path / "cut") == 0
    assert open_pack(tmp_path / "cut").content(0) == index.path(1).read_bytes()
    assert not list(tmp_path.glob("*.part*"))


def test_a_disk_too_small_is_named_with_the_space_it_needs(tmp_path, index, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=3e5))
    large = replace(index, stamps=np.array([[44_000_000, 0]] * len(index)))
    with pytest.raises(CannotWrite, match=r"needs 0\.528 GB, .* 0\.000 GB left"):  # exit code 5
        write_pack(large, tmp_path / "pack")


def test_two_writers_do_not_meet(tmp_path, index, monkeypatch):
    def second(*progress):
        for other in (index, replace(index, stamps=index.stamps + 1)):
            with pytest.raises(DataError, match=r"another process is writing .*two"):
                write_pack(other, tmp_path / "two")

    monkeypatch.setattr(module, "show_progress", second)
    write_pack(index, tmp_path / "two")


def test_packing_again_does_nothing_and_overwrites_nothing_else(tmp_path, index, pack):
    before = {path: path.stat().st_mtime_ns for path in pack.iterdir()}
    assert write_pack(index, pack) == len(index)
    assert {path: path.stat().st_mtime_ns for path in pack.iterdir()} == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tar").write_text("years of work")
    (tmp_path / "file").write_bytes(b"")
    for other in ("thesis", "file"):
        with pytest.raises(DataError, match=r"exists and is not a pack: choose another folder"):
            write_pack(index, tmp_path / other)
    assert (tmp_path / "thesis" / "text.tar").read_text() == "years of work"
    save_index(index, tmp_path / "thesis" / INDEX)
    with pytest.raises(DataError, match="is not the index of a pack"):
        open_pack(tmp_path / "thesis")


def test_what_cannot_be_packed_is_named(tmp_path, index):
    name = index.name(3)
    index.path(3).write_bytes(b"longer or shorter")
    with pytest.raises(DataError, match=rf"{name} has changed since its index was made"):
        write_pack(index, tmp_path / "a")
    index.path(3).unlink()
    with pytest.raises(DataError, match=rf"{name} cannot be packed: No such file"):
        write_pack(index, tmp_path / "a")
    with pytest.raises(DataError, match=r"all 12 images .* are bad"):
        write_pack(replace(index, bad=dict.fromkeys(range(12), "")), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_damaged_image_is_named_and_replaced_where_allowed(index, pack, reader):
    """A shard that is cut short under the run ends it by name."""
    shard, offset, _ = place(open_pack(pack), 5)
    damage(shard, offset)
    plan = unlabeled(open_pack(pack), batch=12)
    with pytest.raises(BadImage, match=r"pack/.*image.*its checksum is another"):
        opened(plan, reader)(0)
    loader = opened(plan, reader, bad_images=12, prefetch=1)
    assert all(torch.isfinite(view).all() for view in loader(0))
    assert list(loader.replaced) == [5]
    shard, offset, _ = place(plan.index, 6)
    os.truncate(shard, offset)
    # No further image is bad: none is to be replaced, however many are allowed to be.
    with pytest.raises(DataError, match=rf"{shard.name} was cut short while in use: .* bytes") as caught:
        [loader(step) for step in range(1, 4)]
    assert not isinstance(caught.value, BadImage) and list(loader.replaced) == [5]


def test_reads_in_pieces_are_joined_and_failed_ones_named(index, pack, monkeypatch):
    packed, whole, pread = open_pack(pack), index.path(3).read_bytes(), os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, start: pread(file, min(length, 100), start))
    assert len(whole) > 250 and packed.content(3) == whole
    monkeypatch.setattr(os, "pread", lambda file, length, start: pread(file, min(length, 1), start))
    foreign = tar_of(pack / "foreign.tar", ("1.jpg", b"image"), ("1.cls", b"12"))
    assert scan_shard(foreign).labels.tolist() == [12]
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(DataError, match=r"00000\d\.tar cannot be read: Input/output error"):
        packed.content(3)


@pytest.fixture
def here(index, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("""\
data: {kind: image_folder, root: ., train: images, validation: null, backend: torchvision}
criterion: {temperature: 0.1, unsupervised_batch_size: 2}
optimization: {epochs: 1, lr: 1.0}
""")
    return tmp_path


def images_of(*overrides, validation=False):
    return open_images(load_config("run.yaml", overrides), ALONE, validation=validation)


def data(*arguments) -> int:
    return cli.main(["data", *arguments])


def test_a_run_reads_the_pack_alone(here, index, capsys, monkeypatch):
    """It ends where the folder's kept index has other images."""
    files = images_of()
    assert data("pack", "run.yaml", "--output", "a") == 0
    assert f"a: 12 images of {here}/images packed, 0.000 GB" in capsys.readouterr().out
    assert data("pack", "run.yaml", "data.pack=a") == 0
    assert f"a: has all 12 images of {here}/images already" in capsys.readouterr().out
    (here / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(here / "empty")
        assert data("pack", "../run.yaml", "--output", ".", "data.root=..", f"logging.folder={here}") == 0
    assert contents(here / "empty") == contents(here / "a")
    assert data("check", "run.yaml", "data.pack=a") == 0
    index_path(load_config("run.yaml"), here / "images", True).unlink()
    (here / "images").rename(here / "elsewhere")
    packed = images_of("data.pack=a")
    assert packed.fingerprint() == files.fingerprint()
    assert packed.train.content(0) == (here / "elsewhere" / index.name(0)).read_bytes()
    assert not load_config("run.yaml", ["data.pack=a"]).changed_keys(load_config("run.yaml").canonical())
    write_pictures(here / "images", count=14, side=40)
    images_of()
    with pytest.raises(DataError, match="other images than the index"):
        images_of("data.pack=a")


def test_a_run_and_data_check_read_shards_of_another_program(here, pack, capsys):
    """Their index is kept in logging.folder; the check writes down which images are bad."""
    (pack / INDEX).unlink()
    foreign = ("data.pack=pack", "data.validation=images")
    assert data("check", "run.yaml", *foreign) == 0
    kept = kept_index(load_config("run.yaml", foreign))
    assert kept_index(load_config("run.yaml", [*foreign, "data.index=other.npz"])) == kept
    save_index(replace(load_index(kept), bad={2: "another decoder refuses it"}), kept)
    assert data("check", "run.yaml", *foreign) == 0
    # Its validation folder keeps its own classes.
    assert images_of(foreign[1], validation=True).validation.classes == ("class_0", "class_1", "class_2")
    images = images_of("data.pack=pack/0000{00..01}.tar")
    assert len(images.train) < 12 and images.train.classes == ("class 0", "class 1")
    shard, offset, length = place(images.train, 1)
    damage(shard, offset + length // 2)
    assert data("check", "run.yaml", "data.pack=pack") == 3
    assert "000000.tar/00000001.jpg" in capsys.readouterr().err
    with pytest.raises(BadImage, match=r"000000\.tar/00000001\.jpg"):
        images_of("data.pack=pack")
    assert list(images_of("data.pack=pack", "data.bad_images=1").train.bad) == [1]


def test_data_pack_refuses_no_output_and_images_in_memory(here, capsys):
    for arguments, words in (
        (("run.yaml",), "--output is needed"),
        (("digits_demo", "--output", "d"), "in memory already"),
    ):
        assert data("pack", *arguments) == 2 and words in capsys.readouterr().err
