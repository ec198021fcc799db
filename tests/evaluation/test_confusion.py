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
    cells = [(0, 0)] * 5 + [(0, 1)] * 3 + [(1, 1)] * 8 + [(1, 2)] + [(2, 2), (2, 0)] * 4
    truth, predicted = torch.tensor(cells).T
    lines = confusion._most_confused(per_class(predicted, truth, ["cat", "dog", "cow"]))
    assert lines[:8] == [
        "most confused, of 8 wrong of 25",
        "    4 of     8  cow as cat",
        "    3 of     8  cat as dog",
        "    1 of     9  dog as cow",
        "",
        "least accurate classes",
        " 50.0 % of     8  cow",
        " 62.5 % of     8  cat",
    ]
    assert confusion.shown_name("x" * 60 + "12") == "x" * 9 + "…" + "x" * 8 + "12"


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 30, 300, 30_000])
def test_confusion_picture_is_drawn_for_any_number_of_classes_and_any_name(classes, capsys):
    """Right cells are blue and wrong ones red, so the picture has both. A matrix of 30,000 classes would have 7 GB."""
    truth = torch.arange(classes).repeat(4)
    predicted = truth.clone()
    # Within the frame: before matplotlib 3.11 its line hides small cells.
    predicted[classes // 2] = classes // 4
    names = [f"$\\nname\udc80 {i}{'x' * 60}" for i in range(classes)]
    picture = Image.open(io.BytesIO(confusion_picture(per_class(predicted, truth, names), "$title 日")))
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    assert capsys.readouterr().out.count("are boxes") == 1
    assert picture.size == (2100, 1260)
    assert (pixels[[0, -1]] == 255).all() and (pixels[:, [0, -1]] == 255).all()  # no name is cut by an edge
    blue, red = pixels[..., 2] - pixels[..., 0], pixels[..., 0] - pixels[..., 2]
    assert ((blue > 60).any(0).argmax() > 200) == (classes <= 60), "up to 60 names at its side"
    assert (blue > 60).sum() > 300 and (red > 60).sum() > 3
