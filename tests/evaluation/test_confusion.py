"""Confusion matrices as pictures: readable with any number of classes, whatever their names."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fastsuncet.evaluation import confusion
from fastsuncet.evaluation.confusion import confusion_picture
from fastsuncet.evaluation.scoring import per_class


def test_confusion_picture_lists_pairs_and_classes_by_name():
    counts = np.array([[5, 3, 0], [0, 8, 1], [4, 0, 4]])
    assert confusion._pairs(counts, ["cat", "dog", "cow"]) == [
        "most confused, of 8 wrong of 25",
        "    4 of     8  cow as cat",
        "    3 of     8  cat as dog",
        "    1 of     9  dog as cow",
        "",
    ]
    assert confusion._worst(counts, ["cat", "dog", "cow"])[1:3] == [
        " 50.0 % of     8  cow",
        " 62.5 % of     8  cat",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 30, 300])
def test_confusion_picture_is_drawn_for_any_number_of_classes_and_any_name(classes):
    """Right cells are blue and wrong ones red, so the picture has both."""
    matrix = torch.eye(classes, dtype=torch.int64) * 9
    matrix[0, classes - 1] = 3
    names = [f"$\\nname\udc80 {i}{'x' * 60}" for i in range(classes)]
    picture = Image.open(io.BytesIO(confusion_picture(per_class(matrix, names), "$title")))
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    assert picture.size == (2100, 1260)
    assert (pixels[[0, -1]] == 255).all() and (pixels[:, [0, -1]] == 255).all()  # no name is cut by an edge
    blue, red = pixels[..., 2] - pixels[..., 0], pixels[..., 0] - pixels[..., 2]
    assert (blue > 60).sum() > 300 and (red > 60).sum() > 3
