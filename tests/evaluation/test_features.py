"""Every evaluation sees each image once, on any number of ranks, in views of the right pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation import features
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.knn import online_knn
from fastsuncet.evaluation.protocols import accuracy, knn, linear, npi
from fastsuncet.models.resnet import build_model
from tests.support.colors import ALONE, MeanColor, color_config, write_colors
from tests.support.pictures import write_pictures
from tests.support.ranks import run_ranks
from tests.support.runs import small_config


def evaluate_on_rank(rank: int, world_size: int, folder: str) -> list:
    """Run every evaluation on this rank: of colors, which all get right, and of an untrained encoder."""
    place = Place(rank, world_size, torch.device("cpu"))
    config = color_config(Path(folder), "npi.views=2", "evaluation.knn_k=3")
    images = open_images(config, place, validation=True)
    right = [run(MeanColor(), images, config, place).metrics["top1"] for run in (knn, npi, linear, accuracy)]
    model = build_model("resnet_tiny", seed=1)
    untrained = [run(model.encoder, images, config, place).metrics for run in (knn, npi, linear)]
    rows = outputs(model.encoder, images.validation, np.arange(7), config, place, batch=2)
    views = outputs(model.encoder, images.train, images.split.indices, config, place, crops=2, batch=7)
    return [right, untrained, online_knn(model, images, config, place), rows, views]


@pytest.mark.slow
def test_evaluations_count_each_image_once_on_any_number_of_ranks(tmp_path):
    """11 validation images: 4, 4 and 3 on three ranks."""
    write_colors(tmp_path)
    right, untrained, online, rows, views = evaluate_on_rank(0, 1, str(tmp_path))
    assert right == [1.0, 1.0, 1.0, 1.0]
    assert rows.shape == (7, 64) and views.shape == (18, 2, 64)
    for theirs in run_ranks(evaluate_on_rank, 3, str(tmp_path)):
        assert theirs[0] == right and theirs[2] == pytest.approx(online, rel=1e-6)
        for one, other in zip(untrained, theirs[1]):
            assert other == pytest.approx(one, abs=1e-12)
        torch.testing.assert_close(theirs[3], rows, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs[4], views, rtol=1e-4, atol=1e-5)


class Extremes(nn.Module):
    """Return the darkest and the brightest value of each channel, (B, 6)."""

    def forward(self, x):
        return torch.stack([x.amin((2, 3)), x.amax((2, 3))], 2).flatten(1)


def test_outputs_of_crops_does_not_change_colors(tmp_path):
    """Each pixel of a crop lies between the darkest and brightest of its image, which is not so after a jitter."""
    index = write_pictures(tmp_path / "pictures", count=4, side=40)
    config = small_config(tmp_path, "data.augmentation.strength=1.0", "data.augmentation.gray=1.0")
    crops = outputs(Extremes(), index, np.arange(4), config, ALONE, crops=8)  # (4, 8, 6)
    for i in range(4):
        pixels = np.asarray(Image.open(index.path(i))).reshape(-1, 3) / 255
        low, high = pixels.min(0) - 0.02, pixels.max(0) + 0.02
        shown = crops[i].numpy().reshape(8, 3, 2)
        assert (shown[:, :, 0] >= low).all() and (shown[:, :, 1] <= high).all()
        assert np.abs(shown[:, 0] - shown[:, 2]).max() > 0.02, "the crop is not gray"


def test_outputs_keeps_mode_and_statistics_of_the_network(colors, monkeypatch):
    (config, images), shown = colors, []
    monkeypatch.setattr(features, "show_progress", lambda *progress: shown.append(progress))
    network = build_model("resnet_tiny").encoder.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    outputs(network, images.validation, np.arange(5), config, ALONE, batch=2, what="images")
    assert network.training and shown == [("images", done, 5) for done in (2, 4, 5)]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
