"""Tar shards that another program wrote: what is read from them, and what is refused."""

import bz2
import gzip
import lzma
import os
import shutil
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from pipelines.data_errors import DataError
from pipelines.datasets.index import load_index, save_index
from pipelines.datasets.pack import open_pack
from pipelines.datasets.shards import Shards, scan_shard
from tests.support.archives import tar_of
from tests.support.pictures import encoded


def picture(width: int = 9, kind: str = "JPEG", **options) -> bytes:
    return encoded(Image.new("RGB", (width, 7), (width, 2, 3)), kind, **options)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards of five images, with members that are no images between them."""
    root = tmp_path / "shards"
    tar_of(
        root / "a-000.tar",
        ("./n01_1.jpg", picture(11)),
        ("./n01_1.json", b"{}"),
        ("./n01_1.cls", b"2"),
        ("n01_2.JPEG", picture(12)),
        ("n01_2.cls", b"0\n"),
        ("README", b"no extension"),
        *((name, b"") for name in ("./.jpg", "._n01_1.jpg", ".h/1.jpg", "@eaDir/1.jpg", "a/__MACOSX/1.jpg")),
    )
    tar_of(
        root / "a-001.tar",
        ("deep/" + "x" * 120, b""),  # a name that needs an extended header
        ("deep/3.png", picture(13, "PNG")),
        ("deep/4.cls", b"1"),
        ("deep/4.jpg", picture(14)),
        ("deep/5.jpg", b"<html>"),
        kind=tarfile.GNU_FORMAT,
    )
    tar_of(root / "a-001.tar", ("deep", b""), mode="a", type=tarfile.DIRTYPE)
    return root


def test_open_pack_reads_shards_of_another_program(folder):
    index = open_pack(folder)
    files = ["a-000.tar/n01_1.jpg", "a-000.tar/n01_2.JPEG", "a-001.tar/deep/3.png"]
    assert list(index.files) == [*files, "a-001.tar/deep/4.jpg", "a-001.tar/deep/5.jpg"]
    assert index.labels.tolist() == [2, 0, -1, 1, -1]
    assert index.classes == ("class 0", "class 1", "class 2")
    assert index.sizes.tolist() == [[7, 11], [7, 12], [7, 13], [7, 14], [0, 0]]
    assert index.bad == {4: "not an image in a format that is read (JPEG, PNG, WEBP, BMP, TIFF)"}
    assert index.path(3) == folder / "a-001.tar" / "deep" / "4.jpg"
    assert [index.content(i) for i in (1, 2)] == [picture(12), picture(13, "PNG")]
    rows = index.pack.fetch(np.array([3, 0, 3]))
    assert [row.tobytes() for row in rows] == [picture(width) for width in (14, 11, 14)]
    assert index.damage(0) is None  # nothing is known of its bytes


def test_open_pack_takes_patterns(folder):
    for pattern, names in (
        ("a-000.tar", ["a-000.tar"]),
        ("*.tar", ["a-000.tar", "a-001.tar"]),
        ("a-{000..001}.tar", ["a-000.tar", "a-001.tar"]),
        ("a-00{1,0}.tar", ["a-001.tar", "a-000.tar"]),
        ("{a-000,a-001,a-000}.tar", ["a-000.tar", "a-001.tar"]),
    ):
        assert [path.name for path in open_pack(f"{folder}/{pattern}").pack.paths] == names
    (folder / "a-000.tar").rename(folder / "{b,c}.tar")  # names of what exists are not patterns
    folder = folder.rename(folder.with_name("{1..3}[d]"))
    for there in (folder / "{b,c}.tar", folder):
        assert open_pack(there).pack.paths[-1].name == "{b,c}.tar"
    (folder / "a-001.tar").rename(folder / "a-1.TAR")
    (folder / "a-1.TAR.gz").write_bytes(b"")  # unpacked already
    assert [path.name for path in open_pack(folder).pack.paths] == ["a-1.TAR", "{b,c}.tar"]
    (folder / "a-1.TAR").rename(folder / "a-[0].tar")
    shutil.copy(folder / "{b,c}.tar", folder / "a-0.tar")
    assert open_pack(folder / "a-[0].tar").pack.paths[0].name == "a-[0].tar"


def test_open_pack_names_what_is_missing(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "b.tar.gz.md5").write_bytes(b"")
    (folder / "b.TGZ").write_bytes(b"")
    for pattern, said in (
        ("shards/a-{000..002}.tar", r"no pack or shard .*a-002\.tar"),
        ("shards/a-{001..000}.tar", r"\{001\.\.000\} in .*a-\{001.* is neither a list nor a range"),
        ("shards/{a}.tar", r"\{a\} in .* is neither a list nor a range"),
        ("empty", r"no pack or shard .*empty/\*\.tar"),
        ("shards/b.*", r"b\.TGZ is compressed: unpack it"),
        ("shards", r"b\.TGZ is compressed: unpack it .* or name the other shards, as .*shards/\*\.tar"),
    ):
        with pytest.raises(DataError, match=said):
            open_pack(tmp_path / pattern)
    tar_of(tmp_path / "empty" / "a.tar", ("a.txt", b""))
    with pytest.raises(DataError, match=r"no image \(KEY.jpg, KEY.png\) in 1 shard \(.*a\.tar\)"):
        open_pack(tmp_path / "empty")


def test_open_pack_keeps_a_scan_until_a_shard_changes(folder, tmp_path, monkeypatch, capsys):
    kept, scan = tmp_path / "kept.npz", mock.Mock(wraps=scan_shard)
    monkeypatch.setattr("pipelines.datasets.pack.scan_shard", scan)
    first = open_pack(folder, kept=kept)
    again = open_pack(folder, kept=kept)
    assert scan.call_count == 2
    assert again.fingerprint() == first.fingerprint() and again.bad == first.bad
    assert again.content(2) == first.content(2) and again.root == folder
    time = (folder / "a-000.tar").stat().st_mtime_ns
    os.utime(folder / "a-000.tar", ns=(time, time + 1))
    open_pack(folder, kept=kept)
    tar_of(folder / "a-002.tar", ("6.jpg", picture()))
    assert len(open_pack(folder, kept=kept)) == 6 and scan.call_count == 7
    open_pack(folder, kept=kept)
    assert scan.call_count == 7
    open_pack(folder, kept=kept, scan=True)  # as `data check` does
    assert scan.call_count == 10
    kept.write_bytes(kept.read_bytes()[:-1])  # damaged
    assert len(open_pack(folder, kept=kept)) == 6
    kept.chmod(0o666)
    assert len(open_pack(folder, kept=kept)) == 6 and scan.call_count == 16
    assert open_pack(folder, kept=kept, upright=True).upright
    assert "is made anew, because other users can write it" in capsys.readouterr().out


def test_open_pack_finds_a_size_behind_a_long_header(tmp_path):
    """PIL is given the beginning of an image, and all of it where that is not enough."""
    content = picture(30, icc_profile=np.random.default_rng(0).bytes(200_000))
    tar_of(tmp_path / "a.tar", ("1.jpg", content))
    assert open_pack(tmp_path / "a.tar").sizes.tolist() == [[7, 30]]


def test_scan_shard_names_a_shard_cut_short_anywhere_or_no_tar(folder):
    path = folder / "a-000.tar"
    whole, end = path.read_bytes(), scan_shard(path).members["offset"][-1]
    lengths = (0, 100, 512, 1024, 1536, end, end + 100, len(whole.rstrip(b"\0")))
    damaged, again = (*(whole[:length] for length in lengths), b"no tar"), r".*Copy the shard here again"
    packed = [
        (pack(whole), r"it is compressed\. Unpack it")
        for pack in (gzip.compress, bz2.compress, lzma.compress)
    ]
    for content, said in (*((content, again) for content in damaged), *packed):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"shard .*a-000\.tar cannot be used: {said}"):
            open_pack(folder)


def lost(content: bytes, at: int, size: int) -> bytes:
    return content[:at] + bytes(size) + content[at + size :]


@pytest.mark.parametrize(
    "damaged",
    [
        lambda shard, at: shard[:at] + b"X" + shard[at + 1 :],  # its checksum is wrong
        lambda shard, at: lost(shard, at, 512),
        lambda shard, at: lost(shard, at - 300, 812),  # the page begins in the image before
        lambda shard, at: shard * 2,
        lambda shard, at: shard + bytes(1 << 17) + shard,
    ],
    ids=["header", "lost header", "page", "joined", "joined behind zeros"],
)
def test_scan_shard_names_images_that_a_lost_page_or_a_join_would_hide(folder, damaged):
    """A block of zeros is a tar's end, so the images behind it were silently left out."""
    path = tar_of(folder / "b.tar", *((f"{i}.jpg", picture()) for i in range(6)), kind=tarfile.USTAR_FORMAT)
    at = int(scan_shard(path).members["offset"][3]) - 512
    path.write_bytes(damaged(path.read_bytes(), at))
    said = r"b\.tar cannot be used: it is cut short, damaged, or joined with another one, after byte \d"
    with pytest.raises(DataError, match=said):
        open_pack(path)


def test_open_pack_counts_what_is_left_out(tmp_path, capsys):
    names = ("1.jpg", "x.y/2.v2.jpg", "3.left.PNG", "4.HEIC", "5.gif", "6.avif", "7.txt")
    labels = ((name, b"1") for name in ("1.cls", "2.cls", "x.y/2.cls"))
    tar_of(tmp_path / "a.tar", *((name, picture()) for name in names), *labels)
    assert list(open_pack(tmp_path / "a.tar").files) == ["a.tar/1.jpg"]
    second, other, label = capsys.readouterr().out.splitlines()
    assert (
        "2 files in shards left out (a.tar/x.y/2.v2.jpg, a.tar/3.left.PNG): in WebDataset's layout" in second
    )
    assert "3 files in shards left out (a.tar/4.HEIC, a.tar/5.gif, a.tar/6.avif): they are of a kind" in other
    assert "2 files in shards left out (a.tar/2.cls, a.tar/x.y/2.cls): there is no image of this key" in label


def test_open_pack_takes_zeros_of_any_length_at_the_end(folder, capsys):
    """`tar -b 512` fills a record of 256 KiB; a line names the shard, because an unfinished copy has such zeros too."""
    with open(folder / "a-000.tar", "ab") as shard:
        shard.write(bytes(1 << 18))
    assert len(open_pack(folder)) == 5
    assert "note: 1 shard with over 64 KiB of zeros at the end (a-000.tar)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("members", "header", "said"),
    [
        ([("/etc/passwd.jpg", b"")], {}, "'/etc/passwd.jpg' is not a plain file below"),
        ([("../out.jpg", b"")], {}, "'../out.jpg' is not a plain file below"),
        (
            [("a.jpg", b"")],
            {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
            "'a.jpg' is a link. .* --dereference",
        ),
        (
            [("a.jpg", b"")],
            {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
            "'a.jpg' is a link. .* --hard-deref",
        ),
        ([("a.jpg", b"")], {"type": tarfile.CHRTYPE}, "'a.jpg' is not a plain"),
        (
            [("a.jpg", b"x" * 600)],
            {"pax_headers": {"GNU.sparse.map": "0,9"}},
            "is sparse. .* without --sparse",
        ),
        ([("a.jpg", b"")], {"pax_headers": {"size": "-1024"}}, "cannot be used"),
        ([("a.jpg", b"")], {"pax_headers": {"size": str(1 << 70)}}, "cannot be used"),
        ([("a.jpg", b"")], {"pax_headers": {"comment": "x" * (2 << 20)}}, "a header of more than 1,048,576"),
        ([("a.jpg", b""), ("a.jpg", b"")], {}, "two images or two labels of the key 'a'"),
        ([("a.jpg", b""), ("a.png", b"")], {}, "two images or two labels of the key 'a'"),
        ([("a.cls", b"1"), ("b.jpg", b""), ("a.cls", b"1")], {}, "two images or two labels of the key 'a'"),
        ([("a.cls", b"cat")], {}, "label 'a.cls' is no whole number from 0: b'cat'"),
        ([("a.cls", b"9" * 4000)], {}, "is no whole number"),
        ([("a.cls", b"0" * 31 + b"12")], {}, "is no whole number"),  # not class 1
        ([("two\nlines.jpg", b"")], {}, r"shard .*bad\.tar cannot be used: .* line break"),
    ],
)
def test_scan_shard_refuses_hostile_members(tmp_path, monkeypatch, members, header, said):
    """Whatever a tar asks for, nothing is written, nothing outside is read and no memory is taken for it."""
    monkeypatch.chdir(tmp_path)
    tar_of(tmp_path / "bad.tar", *members, **header)
    with pytest.raises(DataError, match=said):
        open_pack(tmp_path / "bad.tar")
    assert os.listdir(tmp_path) == ["bad.tar"]


@pytest.mark.parametrize("name", ["a.jpg", ".hidden"])
@pytest.mark.parametrize("size", [-512, 1 << 62])
def test_scan_shard_ends_on_impossible_sizes(tmp_path, size, name):
    """A size that leads back must not make a loop."""
    member = tarfile.TarInfo(name)
    member.size = size
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(DataError, match=r"shard .*a\.tar"):
        scan_shard(tmp_path / "a.tar")


def test_shards_refuse_members_outside_of_them(folder):
    """The index of a pack is a file like any other."""
    pack = open_pack(folder).pack
    outside = [("shard", 2), ("offset", -1), ("length", -1), ("offset", 1 << 62), ("length", (1 << 63) - 1)]
    for key, value in outside:
        members = pack.members.copy()
        members[key][1] = value
        with pytest.raises(DataError, match="is damaged: an image lies in no shard"):
            Shards(pack.paths, pack.stamps, members)
    with pytest.raises(DataError, match="its tables do not fit"):
        Shards(pack.paths, pack.stamps[:1], pack.members)


def test_shards_behind_links_out_of_their_folder_are_refused(folder, tmp_path):
    save_index(open_pack(folder), tmp_path / "index.npz")
    (folder / "a-001.tar").rename(tmp_path / "away.tar")
    (folder / "a-001.tar").symlink_to(tmp_path / "away.tar")
    for opening in (lambda: open_pack(folder), lambda: load_index(tmp_path / "index.npz")):
        with pytest.raises(DataError, match=r"a-001.tar is a link that leads out of .*shards"):
            opening()
    (folder / "a-001.tar").unlink()
    (folder / "a-001.tar").symlink_to("a-000.tar")
    assert len(open_pack(folder)) == 4
