"""PASCAL VOC 2007 from its lists: what each image shows, and wrong lists."""

import dataclasses

import numpy as np
import pytest

from pipelines.data_errors import DataError
from pipelines.datasets.index_file import load_index, save_index
from pipelines.datasets.voc07 import CLASSES, part_size, voc07
from tests.support.streams import evaluation
from tests.support.voc import write_voc


def lists(root):
    return root / "VOCdevkit" / "VOC2007" / "ImageSets" / "Main"


def rewrite(root, name: str, change) -> None:
    path = lists(root) / name
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_voc07_parts_have_their_images_and_presence(tmp_path):
    presence = write_voc(tmp_path)
    assert len(CLASSES) == 20 and list(CLASSES) == sorted(CLASSES)
    for parts in (["train"], ["val"], ["test"], ["train", "val"]):
        index = voc07(tmp_path, *parts)
        assert sum(part_size(tmp_path, part) for part in parts) == len(index)
        assert np.array_equal(index.presence, np.concatenate([presence[part] for part in parts]))
        assert index.presence.dtype == np.int8
        assert set(index.presence.ravel().tolist()) == {1, 0, -1}
        assert (index.labels == -1).all() and index.classes == CLASSES
        assert (index.sizes >= 40).all() and not index.bad
    for outer in ("VOCdevkit", "VOCdevkit/VOC2007"):
        assert voc07(tmp_path / outer, "train", "val").fingerprint() == index.fingerprint()
    assert index.name(10) == "JPEGImages/000011.jpg" and index.path(0).is_file()
    loader = evaluation(index, np.arange(len(index)), "torchvision", 4, 24, 28)
    assert [tuple(images.shape) for (images,) in loader] == [(4, 3, 24, 24), (4, 3, 24, 24), (3, 3, 24, 24)]


def test_presence_is_in_the_fingerprint_and_the_kept_index(tmp_path):
    write_voc(tmp_path)
    index = voc07(tmp_path, "val")
    other = index.presence.copy()
    other[2, 3] = -other[2, 3] or 1
    assert dataclasses.replace(index, presence=other).fingerprint() != index.fingerprint()
    save_index(index, tmp_path / "kept.npz")
    assert np.array_equal(load_index(tmp_path / "kept.npz").presence, index.presence)


def set_line(number, text):
    return lambda lines: lines.__setitem__(number - 1, text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_line(2, "000008"), r"cat_val.txt line 2 is not the name of an image and 1, -1 or 0"),
        (set_line(2, "000008 1 1"), "line 2 is not"),
        (set_line(3, "000009 2"), "line 3 is not"),
        (set_line(3, "../../x 1"), "line 3 is not"),
        (lambda lines: lines.clear(), "line 1 is not"),
        (set_line(3, "000007 1"), "cat_val.txt names other images than .*aeroplane_val.txt"),
        (lambda lines: lines.pop(3), "cat_val.txt names other images"),
    ],
)
def test_voc07_names_a_wrong_list_with_its_line(tmp_path, change, said):
    write_voc(tmp_path)
    rewrite(tmp_path, "cat_val.txt", change)
    with pytest.raises(DataError, match=said):
        voc07(tmp_path, "val")


def test_voc07_names_an_image_of_two_parts(tmp_path):
    write_voc(tmp_path)
    for name in CLASSES:
        rewrite(tmp_path, f"{name}_val.txt", lambda lines: lines.append("000003 1"))
    with pytest.raises(DataError, match="VOC2007: 000003 twice in the lists of train and val"):
        voc07(tmp_path, "train", "val")


def test_voc07_names_what_is_missing_and_where_it_is(tmp_path):
    with pytest.raises(DataError, match=r"no PASCAL VOC 2007 under .*VOCtrainval_06-Nov-2007.tar"):
        voc07(tmp_path, "train")
    write_voc(tmp_path)
    (lists(tmp_path) / "sofa_test.txt").unlink()
    with pytest.raises(DataError, match=r"there is no .*sofa_test.txt: VOCtest_06-Nov-2007.tar has it"):
        voc07(tmp_path, "test")
    (tmp_path / "VOCdevkit" / "VOC2007" / "JPEGImages" / "000008.jpg").unlink()
    assert voc07(tmp_path, "val").bad == {1: "no such file"}
