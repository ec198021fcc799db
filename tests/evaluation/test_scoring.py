"""Counting correct predictions, and labels that an evaluation cannot use."""

import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fastsuncet.commands.evaluate import KINDS, _with_its_classes
from fastsuncet.config import ConfigErrors
from fastsuncet.data.dataset import Images
from fastsuncet.errors import NumericalError
from fastsuncet.evaluation.protocols import accuracy, knn, linear, npi
from fastsuncet.evaluation.scoring import measured, per_class, supports
from pipelines.data_errors import DataError
from pipelines.datasets.index import class_numbers, with_classes
from pipelines.datasets.label_splits import labeled_split
from pipelines.datasets.published import pixel_index
from tests.support.colors import ALONE, MeanColor, open_colors


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10_000))
def test_measured_counts_like_a_stable_sort(rows, classes, seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (rows, classes))  # many ties
    truth = rng.integers(0, classes, rows)
    order = np.argsort(-scores, axis=1, kind="stable")
    found = measured(torch.tensor(scores).float(), torch.tensor(truth), {})
    assert found.metrics["top1"] == (order[:, 0] == truth).mean()
    assert found.metrics.get("top5", 1.0) == sum(t in row[:5] for t, row in zip(truth, order)) / rows
    assert found.predicted.tolist() == order[:, 0].tolist() and found.truth.tolist() == truth.tolist()


@pytest.mark.parametrize("kind", ["knn", "linear", "npi", "accuracy"])
def test_an_evaluation_refuses_outputs_that_are_not_finite(colors, kind):
    config, images = colors
    overflowing = nn.Sequential(MeanColor(), nn.Threshold(2.0, torch.nan))  # a mean color is below 2
    with pytest.raises(NumericalError, match="outputs are not finite"):
        KINDS[kind][0](overflowing, images, config, ALONE)


def test_per_class_names_what_each_class_is_taken_for():
    predicted, truth = torch.tensor([[0, 0], [2, 2], [1, 2], [0, 0], [1, 0], [1, 2], [2, 2], [0, 0]]).T
    found = per_class(predicted, truth, ("cat", "cow", "dog"))
    assert found == {
        "cat": {"images": 4, "accuracy": 0.75, "predicted": {"cat": 3, "cow": 1}},
        "dog": {"images": 4, "accuracy": 0.5, "predicted": {"cow": 2, "dog": 2}},
    }


def test_supports_without_labels_is_an_error_of_the_config(tmp_path):
    config, images = open_colors(tmp_path, "data.split.kind=none")
    for run in (knn, npi, linear):
        with pytest.raises(ConfigErrors, match=r"data\.split\.kind=none(?s:.*)data\.split\.kind=all"):
            run(MeanColor(), images, config, ALONE)


def test_supports_names_a_class_without_a_labeled_image(tmp_path):
    (tmp_path / "names.txt").write_text("r/0.png\nb/1.png\n")
    config, images = open_colors(tmp_path, f"data.split={{kind: names, file: {tmp_path}/names.txt}}")
    with pytest.raises(DataError, match=r"have no labeled image \(g\).* 4 validation"):
        supports(images, config)


def test_accuracy_refuses_other_classes_and_an_image_without_a_label(colors):
    config, images = colors
    network = nn.Sequential(MeanColor(), nn.Linear(3, 2))
    with pytest.raises(DataError, match="the classifier has 2 classes and the images have 3"):
        accuracy(network, images, config, ALONE)
    images.validation.labels[3] = -1
    with pytest.raises(DataError, match=r"1 of the 11 validation images have no label \(b/3\.png\)"):
        accuracy(network, images, config, ALONE)


@pytest.mark.parametrize("numbered_by_folders", [True, False])
def test_classes_0_to_10_are_matched_by_number(numbered_by_folders):
    """Those of folders are in the order of their names, 0, 1, 10, 2; those of shards are called class 0 to class 10."""
    names = [class_numbers(11), tuple(sorted(map(str, range(11))))]
    theirs, ours = reversed(names) if numbered_by_folders else names
    index = pixel_index(ours, np.arange(11), ours, np.zeros((11, 4, 4, 3), np.uint8))
    shown = _with_its_classes(Images(index, labeled_split(index, "all"), index), Mock(classes=theirs))
    for each in (shown.train, shown.validation, with_classes(index, theirs)):
        there = [each.classes[label].split()[-1] for label in each.labels]
        assert there == [name.split()[-1] for name in ours]


def test_validation_images_take_the_class_numbers_of_the_training_images(tmp_path):
    """Also where their index was kept by a run on other training classes."""
    open_colors(tmp_path)
    shutil.copytree(tmp_path / "train", tmp_path / "more")
    shutil.copytree(tmp_path / "train" / "r", tmp_path / "more" / "a")  # b, g, r become 1, 2, 3
    _, images = open_colors(tmp_path, "data.train=more")
    assert images.validation.classes == images.train.classes == ("a", "b", "g", "r")
    for i, label in enumerate(images.validation.labels):
        assert images.validation.classes[label] == images.validation.name(i)[0]
