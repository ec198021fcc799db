"""Folders and CSVs as indexes: which images, in which order, with which labels, and what is refused."""

import errno
import os
import runpy
import struct
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image, ImageOps

from pipelines.data_errors import DataError
from pipelines.datasets import folders, image_headers
from pipelines.datasets.csv_labels import with_csv_labels
from pipelines.datasets.folders import image_folder, image_list, image_tree, look_again
from pipelines.datasets.image_headers import read_rgb
from pipelines.datasets.index import ImageIndex, class_numbers, load_index, save_index, with_classes
from tests.support.pictures import texture, write_image, write_images


def table(path, *lines, encoding="utf-8"):
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


def test_image_folder_orders_classes_and_images(tmp_path):
    write_images(tmp_path, "b/2.jpg", "b/10.jpg", "a-b/1.jpg", "a/1.jpg", "a/deep/er/1.jpg")
    index = image_folder(tmp_path)
    assert index.classes == ("a", "a-b", "b")
    assert list(index.files) == ["a-b/1.jpg", "a/1.jpg", "a/deep/er/1.jpg", "b/10.jpg", "b/2.jpg"]
    assert index.labels.tolist() == [1, 0, 0, 2, 2]
    assert index.sizes.tolist() == [[6, 8]] * 5 and index.bad == {}
    assert index.root == tmp_path


def test_image_folder_takes_known_extensions_in_any_case(tmp_path, capsys):
    """It says how many images it leaves out because no decoder reads them."""
    taken = ["1.jpg", "2.JPEG", "3.Png", "4.webp", "5.bmp", "6.tif", "7.TIFF"]
    write_images(tmp_path / "a", *taken)
    for other in ("notes.txt", "jpg", "8.jpg.part", ".hidden.jpg", "9.gif", "10.HEIC", "11.heic", ".12.gif"):
        (tmp_path / "a" / other).write_bytes(b"")
    write_images(tmp_path, ".cache/1.jpg", "a/.thumbs/1.jpg", "stray.jpg", "a/@eaDir/1.jpg/THUMB_M.jpg")
    (tmp_path / "lost+found").mkdir()
    assert list(image_folder(tmp_path).files) == [f"a/{name}" for name in taken]
    said = f"note: 1 .gif and 2 .heic files below {tmp_path} are not read: convert them to JPEG or PNG\n"
    assert capsys.readouterr().out == said


def test_with_classes_gives_validation_the_training_numbers(tmp_path):
    index = image_folder(write_images(tmp_path, "b/1.jpg", "c/1.jpg"))
    numbered = with_classes(index, ("a", "b", "c"))
    assert numbered.classes == ("a", "b", "c") and numbered.labels.tolist() == [1, 2]
    # Numbers, as of shards with KEY.cls, are those of the folders in order, where there are as many.
    numbered = with_classes(index, class_numbers(2))
    assert numbered.classes == class_numbers(2) and numbered.labels.tolist() == [0, 1]
    for classes, unknown in ((("a", "b"), "c"), (class_numbers(1), "b, c")):
        with pytest.raises(DataError, match=f"classes that no training image has: {unknown}$"):
            with_classes(index, classes)


def test_image_folder_says_what_is_wrong_with_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    write_images(tmp_path / "flat", "1.jpg")
    write_images(tmp_path / "above", "train/a/1.jpg", "val/a/1.jpg")
    write_images(tmp_path / "lacking", "a/1.jpg")
    (tmp_path / "lacking" / "b" / "deep").mkdir(parents=True)
    for name, said in {
        "file": "it is a file",
        "flat": "no class folders",
        "above": "holds train, val, not class folders",
        "lacking": "1 class folder of .* without an image: b$",
    }.items():
        with pytest.raises(DataError, match=said):
            image_folder(tmp_path / name)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_images_are_turned_as_their_exif_tag_says(tmp_path, kind, tag):
    """PIL's own turning is the reference, for the size in the header and for the pixels."""
    picture, exif = Image.fromarray(texture(3, 40, 60)), Image.Exif()
    exif[0x0112] = tag
    picture.save(tmp_path / f"a.{kind.lower()}", kind, exif=exif)
    path = tmp_path / f"a.{kind.lower()}"
    with Image.open(path) as image:
        stored, turned = np.asarray(image), np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(read_rgb(path), stored) and np.array_equal(read_rgb(path, upright=True), turned)
    assert image_tree(tmp_path, upright=True).sizes[0].tolist() == list(turned.shape[:2])
    assert image_tree(tmp_path).sizes[0].tolist() == [40, 60]


def test_images_that_decoders_turn_differently_are_bad(tmp_path, recwarn):
    """DALI 2.4 writes beyond such an image, which kills the process, or turns it otherwise than PIL."""
    runpy.run_path(image_headers.__file__)  # pytest has removed the filter of PIL's own warnings of them
    entry = b"\x12\x01\x03\0\1\0\0\0\6\0\0\0"  # the tag 0x112, a short, one, turned by 90 degrees
    turned = b"II*\0\10\0\0\0\1\0" + entry + bytes(4)
    half_turn, long = turned.replace(b"\6\0", b"\3\0"), turned.replace(b"\3\0\1", b"\4\0\1")
    cut_off, larger = turned[:-8], turned.replace(b"\1\0" + entry, b"\7\0" + entry)
    for name, headers, good in (
        ("turned", [turned], True),
        ("twice", [turned, turned], True),
        ("continued", [turned, bytes(100)], True),
        ("none", [b""], True),
        ("differing", [turned, half_turn], False),
        ("long", [long], False),
        ("cut off", [cut_off], False),
        ("larger", [larger], False),
        ("no header", [b"nothing"], False),
    ):
        path = write_image(tmp_path / f"{name}.jpg")
        parts = [b"Exif\0\0" + header for header in headers]
        segments = b"".join(b"\xff\xe1" + struct.pack(">H", 2 + len(part)) + part for part in parts)
        path.write_bytes(b"\xff\xd8" + segments + path.read_bytes()[2:])
        upright, stored = (image_list([path], upright=upright) for upright in (True, False))
        assert stored.sizes.tolist() == [[6, 8]] and not stored.bad
        assert upright.sizes.tolist() == ([[6, 8] if name == "none" else [8, 6]] if good else [[0, 0]]), name
        assert good or "decoders turn by differently" in upright.bad[0]
    Image.new("P", (8, 6)).save(tmp_path / "palette.png", transparency=b"\x07\x09")
    assert read_rgb(tmp_path / "palette.png").shape == (6, 8, 3)
    assert not recwarn.list


def settle(root: Path, time: int = 1000) -> None:
    """Give all folders a time of long ago: of a new one it cannot be told whether it has changed."""
    for folder in (root, *root.rglob("*/")):
        os.utime(folder, ns=(0, time))


@pytest.fixture
def scanned(tmp_path):
    write_images(tmp_path, "cat/1.jpg", "cat/deep/2.jpg", "dog/3.jpg", "dog/4.jpg")
    settle(tmp_path)
    return image_folder(tmp_path)


def test_look_again_compares_folders_and_a_sample_where_nothing_moved(scanned, monkeypatch):
    """And all files where one of the sample differs."""
    compared = mock.Mock(wraps=folders._compared)
    monkeypatch.setattr(folders, "_compared", compared)
    monkeypatch.setattr(folders, "_listed", None)
    monkeypatch.setattr(folders, "SAMPLE", 2)
    assert look_again(scanned) == (scanned, 0)
    assert [len(call.args[2]) for call in compared.call_args_list] == [2]
    for name in ("dog/3.jpg", "cat/1.jpg"):
        write_image(scanned.root / name, 9)  # in place, which leaves the folder's time
    monkeypatch.setattr(folders, "SAMPLE", 3)  # of four files
    assert look_again(scanned)[0].changed == (0, 2)
    # A bad image is compared at each start: somebody can have repaired it.
    (scanned.root / "dog" / "3.jpg").write_bytes(b"<html>")
    broken = replace(look_again(scanned)[0], folders=scanned.folders)
    write_image(scanned.root / "dog" / "3.jpg", 9)
    monkeypatch.setattr(folders, "SAMPLE", 0)
    assert list(broken.bad) == [2] and look_again(broken)[0].bad == {}


def test_look_again_reads_changed_files_only_and_counts_them(scanned, tmp_path, monkeypatch):
    """Until the next scan, also where the index is kept meanwhile."""
    read, kept, root = mock.Mock(wraps=folders.with_headers), tmp_path / "index.npz", scanned.root
    monkeypatch.setattr(folders, "with_headers", read)
    assert look_again(scanned)[0].notes() == []
    write_image(root / "cat" / "1.jpg", 20, 30)
    (root / "dog" / "3.jpg").write_bytes(b"<html>")
    write_image(root / "dog" / "4.jpg", quality=30)  # as many pixels
    changed, _ = look_again(scanned)
    assert read.call_args.args[1] == ["cat/1.jpg", "dog/3.jpg", "dog/4.jpg"]
    assert changed.sizes.tolist() == [[30, 20], [6, 8], [0, 0], [6, 8]]
    assert list(changed.bad) == [2] and "not an image" in changed.bad[2]
    (note,) = changed.notes()
    assert note == "3 of 4 images changed since their index was made: cat/1.jpg, dog/3.jpg, dog/4.jpg"
    assert changed.contents() != scanned.contents()
    assert scanned.sizes[0].tolist() == [6, 8] and not scanned.bad
    save_index(changed, kept)
    again, _ = look_again(load_index(kept))
    assert again.changed == (0, 2, 3) and again.bad == changed.bad and read.call_count == 1
    # A repaired file is good again, and a time of any year is one.
    write_image(root / "dog" / "3.jpg", 10)
    os.utime(root / "cat" / "deep" / "2.jpg", (0, 10_413_792_000))  # 2300
    again, _ = look_again(again)
    assert again.bad == {} and again.changed == (0, 1, 2, 3)
    assert again.stamps[1, 1] == 10_413_792_000 * 10**9 - 2**64
    (root / "cat" / "deep" / "2.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of the 4 files .*: cat/deep/2\.jpg"):
        look_again(again)


def test_look_again_leaves_images_bad_that_were_from_the_start(scanned):
    (scanned.root / "cat" / "1.jpg").unlink()
    stamps = scanned.stamps.copy()
    stamps[0] = -1
    bad = {0: "no such file", 2: "the decoder refuses it"}
    again, _ = look_again(replace(scanned, stamps=stamps, bad=bad))
    assert again.bad == bad and again.changed == ()


@pytest.mark.parametrize("call", ["open", "stat", "scandir"])
def test_folders_take_no_image_for_bad_or_gone_when_the_disk_fails(scanned, monkeypatch, call):
    """Its index would be kept, and the next run would be another run."""
    real = getattr(os, call)

    def failing(path, *arguments, **keywords):
        if str(path).endswith(".jpg" if call != "scandir" else "deep"):
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return real(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        if call == "open":
            patch.setattr("builtins.open", failing)
        work = look_again if call == "stat" else lambda index: image_folder(index.root)
        with pytest.raises(OSError, match="Stale file handle"):
            work(scanned)
    assert look_again(scanned) == (scanned, 0)


def test_look_again_compares_all_files_of_a_list(tmp_path):
    listed = image_list([write_image(tmp_path / "1.jpg"), write_image(tmp_path / "2.jpg")])
    write_image(tmp_path / "2.jpg", 9)
    assert look_again(listed)[0].changed == (1,)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("dog/5.jpg", b"new", (0, 1)),
        ("cat/deep/er/5.jpg", b"new", (0, 1)),
        ("cow/5.jpg", b"new", (0, 1)),
        ("5.jpg", b"new, in no class", (0, 0)),
        ("dog/notes.txt", b"new", (0, 0)),
        ("dog/3.jpg", b"in place of a file", (1, 0)),
    ],
)
def test_look_again_finds_what_changed_in_a_folder(scanned, monkeypatch, name, content, found):
    """The sample is empty: the folders' times alone say where to look, and say so again at the next start."""
    monkeypatch.setattr(folders, "SAMPLE", 0)
    path = scanned.root / name
    path.parent.mkdir(exist_ok=True)
    Path(f"{path}.part").write_bytes(content)
    os.replace(f"{path}.part", path)
    settle(scanned.root, 2000)
    again, new = look_again(scanned)
    assert (len(again.changed), new) == found
    assert look_again(replace(scanned, folders=again.folders))[1] == found[1]


def test_look_again_finds_a_file_in_a_folder_too_new_to_be_compared(tmp_path):
    image = write_image(tmp_path / "cat" / "1.jpg")
    scanned, now = image_folder(tmp_path), os.stat(tmp_path / "cat")
    image.rename(tmp_path / "cat" / "2.jpg").with_name("1.jpg").write_bytes(b"another")
    os.utime(tmp_path / "cat", ns=(now.st_atime_ns, now.st_mtime_ns))
    assert look_again(scanned)[1] == 1
    # Of the future: the folder is listed each time, and its index kept as it is.
    os.utime(tmp_path / "cat", ns=(0, 2**62))
    scanned = image_folder(tmp_path)
    assert look_again(scanned)[0] is scanned


def test_image_folder_names_a_folder_without_access(tmp_path, monkeypatch):
    write_images(tmp_path, "a/1.jpg")
    # The tests can run as root, to whom nothing is refused.
    refused = mock.Mock(side_effect=[os.scandir(tmp_path), PermissionError(13, "Permission denied")])
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"cannot list .*a: Permission denied"):
        image_folder(tmp_path)


def test_links_are_followed_to_files_inside_the_root_only(tmp_path):
    root = write_images(tmp_path / "root", "a/1.jpg")
    outside = write_images(tmp_path / "root-2", "a/1.jpg")  # a name that begins as the root's does
    (root / "a" / "2.jpg").symlink_to(root / "a" / "1.jpg")
    (root / "a" / "4.jpg").symlink_to(root / "a" / "gone.jpg")
    (tmp_path / "link").symlink_to(root)  # the root itself can be a link
    for folder in (root, tmp_path / "link"):
        index = image_folder(folder)
        assert list(index.files) == ["a/1.jpg", "a/2.jpg", "a/4.jpg"] and index.bad == {2: "no such file"}
    link = root / "a" / "3.jpg"
    link.symlink_to(outside / "a" / "1.jpg")
    with pytest.raises(DataError, match=r"3.jpg is a link that leads out of"):
        image_folder(root)
    link.unlink()
    for place in (root / "b", root / "a" / "b"):
        place.symlink_to(outside / "a")
        with pytest.raises(DataError, match=r"b is a link to a folder.*Give the path of.*cp -rlL"):
            image_folder(root)
        place.unlink()
    os.mkfifo(link)  # opened as a file is, it would wait for a writer
    assert image_folder(root).bad == {2: "not a regular file", 3: "no such file"}
    link.unlink()
    link.symlink_to(link)
    assert "Too many levels of symbolic links" in image_folder(root).bad[2]


@pytest.fixture
def tree(tmp_path):
    cafe = os.fsdecode("caf\xe9/4.jpg".encode())  # UTF-8 on the disk, whatever the locale
    return write_images(tmp_path / "tree", "1.jpg", "x/2.jpg", "x/y/3.jpg", cafe)


def test_csv_labels_are_any_text_in_sorted_order(tree, tmp_path):
    """Also as a spreadsheet writes them, and in tables that are appended to each other."""
    lines = (
        "File, Label",
        "x/2.jpg,zebra",
        "",
        'caf\xe9/4.jpg, "big, red ""cat"""',
        "1.jpg, zebra\xa0",
        "x/y/3.jpg,گربه\u200cها",
        "\ufefffile;label;;",
        'caf\xe9/4.jpg;big, red "cat";;',
        ";;;",
        '"file"\t"label"',
        'caf\xe9/4.jpg\tbig, red "cat"',
    )
    csv = table(tmp_path / "labels.csv", *(f"{line}\r" for line in lines), encoding="utf-8-sig")
    index = image_tree(tree)
    labeled = with_csv_labels(index, csv)
    assert labeled.classes == ('big, red "cat"', "zebra", "گربه\u200cها")
    assert labeled.labels.tolist() == [1, 0, 1, 2]
    other = with_csv_labels(labeled, table(tmp_path / "b.csv", "file,label", "x/2.jpg,dog"))
    assert other.labels.tolist() == [-1, -1, 0, -1] and other.classes == ("dog",)
    assert other.sizes is index.sizes and index.labels.tolist() == [-1] * 4


def test_every_wrong_line_of_a_csv_is_named_at_once(tree, tmp_path):
    lines = {
        "1.jpg,cat": None,
        "gone.jpg,cat": f"no image gone.jpg under {tree}",
        "/etc/passwd,cat": "/etc/passwd: paths must lead downwards from the data folder",
        "../1.jpg,cat": "../1.jpg: paths must lead downwards from the data folder; did you mean 1.jpg?",
        "x/2.jpg,": "no label: write one, or remove the line",
        "x/2.jpg,  ": "no label: write one, or remove the line",
        ",cat": "no file name: write one, or remove the line",
        "1.jpg,dog": "1.jpg is labeled 'dog', but 'cat' on an earlier line",
        "1.jpg": "no label: write one, or remove the line",
        "1.jpg,catfile,label": "3 columns instead of file,label: quote a name that has the separator in it, or add "
        "a missing line break",
        "x/2.jpg,cat": None,
        "C:\\Photos\\Y\\3.JPG,cat": f"no image C:\\Photos\\Y\\3.JPG under {tree}; did you mean x/y/3.jpg?",
        f"{tree}/x/2.jpg,cat": f"{tree}/x/2.jpg: paths must lead downwards from the data folder; did you mean x/2.jpg?",
        "cafe\u0301/4.jpg,cat": f"no image cafe\u0301/4.jpg under {tree}; did you mean caf\xe9/4.jpg?"
        " Its letters have another Unicode form: copy the name from `ls`",
        "new.jpg,cat": f"new.jpg is newer than the index of {tree}: `fastsuncet data check CONFIG` adds it",
        "./1.jpg,cat": f"no image ./1.jpg under {tree}; did you mean 1.jpg?",
        "1.jpg ,cat": f"no image 1.jpg  under {tree}; did you mean 1.jpg?",
        "x/2,cat": f"no image x/2 under {tree}; did you mean x/2.jpg?",
        "5.heic,cat": "5.heic is of a kind that is not read: convert it to JPEG or PNG",
        "x/2.jpg,c\u200bat": "the label 'c\\u200bat' has an invisible character: remove it",
        "file;label": None,  # one table appended to another
        "x/2.jpg;": "no label: write one, or remove the line",
        "x/2.jpg;catFile,label": "the label ends in a header: add the missing line break before it",
    }
    csv = table(tmp_path / "labels.csv", "file,label", *lines)
    index = image_tree(tree)
    write_images(tree, "new.jpg")
    with pytest.raises(DataError) as error:
        with_csv_labels(index, csv)
    wrong = [f"  line {line}: {said}" for line, said in enumerate(lines.values(), 2) if said]
    assert str(error.value).splitlines() == [f"{csv} has 20 wrong lines:", *wrong]


def test_csv_names_that_differ_in_folders_only_are_matched_in_seconds(tmp_path):
    """Each name was compared with each file, again for each wrong line: minutes for 2,000 lines."""
    names = [f"{i}/photo.jpg" for i in range(2000)]
    index = ImageIndex(tmp_path, names, np.full(2000, -1), (), np.ones((2000, 2), np.int32))
    wrong = [f"{name[:-3]}JPG,cat" for name in names]
    csv = table(tmp_path / "labels.csv", "file,label", *wrong, "x/Photo.jpg,cat")
    began = time.process_time()
    with pytest.raises(DataError) as error:
        with_csv_labels(index, csv)
    assert time.process_time() - began < 5
    lines = str(error.value).splitlines()
    assert lines[1].endswith("did you mean 0/photo.jpg?") and lines[20].endswith("did you mean 19/photo.jpg?")
    assert lines[0].endswith("2001 wrong lines:") and lines[-1] == "  and 1981 more"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "first line must be `file,label`, not ''"),
        (b"1.jpg,cat\n", "first line must be `file,label`, not '1.jpg,cat'"),
        (b"\xef\xbb\xbfDatei;Klasse\r\n1.jpg;cat\r\n", "first line must be `file,label`, not 'Datei;Klasse'"),
        (b"file;label;sure\n1.jpg;cat;1\n", "not 'file;label;sure'. Write .* these two columns only"),
        (b"file,label\n", "no line after it"),
        (b"file,label\n1.jpg,caf\xe9\n", "not a CSV in UTF-8"),
        ("file,label\n".encode("utf-16"), r"\(byte 0xff on line 1\): save it as UTF-8"),
        (b'file,label\n1.jpg,"cat" \n', r"csv, line 2: .*Is a quote not closed, or a space behind one\?"),
        (b'file,label\n1.jpg,"cat\nx/2.jpg,dog"\n', "line 3: the label has a line break in it: is a"),
        (b'file,label\n"1.jpg,cat\n', r"csv, line 2: .*Is a quote not closed"),
    ],
)
def test_a_file_that_is_no_table_of_labels_is_refused(tree, tmp_path, content, said):
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises(DataError, match=said):
        with_csv_labels(image_tree(tree), tmp_path / "labels.csv")
