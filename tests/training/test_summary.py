"""The lines that are printed before a run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastsuncet.config import Config, load_config
from fastsuncet.distributed.place import Place
from fastsuncet.training import summary
from tests.support.runs import CONFIGS

IMAGES = 1_281_167


def digits(*words: str) -> Config:
    return load_config(CONFIGS / "digits_demo.yaml", ["optimization.warmup=0", *words])


def paper(*words: str) -> Config:
    return load_config(CONFIGS / "in1k_simclr.yaml", ["data.root=none", "meta.precision=bf16", *words])


@pytest.fixture
def lines_of(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(summary, "memory_of", lambda _: 40 * 10**9)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def lines(
        config: Config, device: str = "cpu", ranks: int = 1, images=None, stream=None
    ) -> dict[str, str]:
        place = Place(0, ranks, torch.device(device))
        found = summary.summary(config, place, images, config.resolve(ranks, IMAGES), stream)
        return dict(line.split(maxsplit=1) for line in found)

    return lines


def test_summary_says_why_pixels_are_not_dalis(lines_of, monkeypatch):
    monkeypatch.setattr(summary, "dali_problem", lambda: "libcuda.so: not found")
    stream = SimpleNamespace(options=SimpleNamespace(backend="torchvision", view_operator=False))
    for asked, why in (
        ("torchvision", "as configured"),
        ("auto", "DALI cannot be used here: libcuda.so: not found"),
    ):
        pixels = lines_of(digits(f"data.backend={asked}"), stream=stream)["pixels"]
        assert pixels == f"torchvision on the CPU ({why})"


class ManyImages:
    """The paper's images, of one size, without files."""

    sizes = np.full((7, 2), (400, 500))

    def __len__(self) -> int:
        return IMAGES


def test_summary_says_what_pieces_cost_and_what_batchnorm_sees(lines_of):
    """4,096 images on one process: 364 GB at once, the memory of 512 views and all pixels in pieces."""
    images = SimpleNamespace(train=ManyImages(), split="none")
    configs = paper(), paper("criterion.micro_batch=512")
    whole, pieces = (lines_of(config, images=images) for config in configs)
    memory, less = (summary.step_memory(config, config.resolve(1, IMAGES)) for config in configs)
    assert whole["norm"] == "statistics of the whole batch"
    assert pieces["norm"] == "statistics of each of 16 pieces, at most 512 views (criterion.micro_batch)"
    assert ", a quarter of it for a second forward pass, " in pieces["compute"]
    # Two steps ahead and one at work: the decoded image and two views, uint8 and float32.
    ahead = 3 * 4096 * (3 * 400 * 500 + 2 * 15 * 224**2)
    assert f"and {ahead / 1e9:.3g} GB for the images read ahead" in whole["memory"]
    pixels = 12 * 224**2
    assert less.activations == memory.activations // 16 + 15 * 512 * pixels
    assert memory.total / 1e9 == pytest.approx(364, abs=1) and less.total / 1e9 == pytest.approx(28, abs=1)


@pytest.mark.parametrize(
    ("device", "ranks", "backend", "problem", "where", "less"),
    [
        # The processes of a CPU share it; a GPU has one process.
        ("cpu", 1, "auto", None, "", False),
        ("cpu", 2, "auto", None, "", True),
        ("cuda", 2, "auto", None, "", False),
        # The step fits this GPU, and the images fit it beside the step only where they are decoded on the CPU.
        ("small cuda", 1, "auto", None, "", True),
        ("small cuda", 1, "torchvision", None, "on the CPU ", False),
        ("small cuda", 1, "auto", "no DALI", "on the CPU ", False),
    ],
)
def test_summary_compares_all_that_shares_a_memory_with_it(
    lines_of, monkeypatch, device, ranks, backend, problem, where, less
):
    config = digits(f"data.backend={backend}")
    sizes = config.resolve(ranks, IMAGES)
    step, feed = summary.step_memory(config, sizes).total, summary.feed_memory(config, sizes, None)
    has = step + feed / 2 if device == "small cuda" else 1.5 * (step + feed)
    monkeypatch.setattr(summary, "memory_of", lambda _: has)
    monkeypatch.setattr(summary, "dali_problem", lambda: problem)
    memory = lines_of(config, device.removeprefix("small "), ranks)["memory"]
    assert f" GB {where}for the images" in memory and ("WHICH IS LESS" in memory) == less


TF32 = ("meta.precision=bf16", "criterion.products=tf32")
LABELS_ALONE = (
    *("criterion.supervision=cross_entropy", "criterion.instance=none", "criterion.supervised_epochs=all"),
    "criterion.unsupervised_batch_size=0",
)
LAYER_NORM = ("model.name=timm/test_efficientnet_ln", "model.head_batchnorm=false", "model.stem=imagenet")
SWAV_ALONE = ("criterion.supervision=cross_entropy", "criterion.instance=swav", "swav.small_crops=0")


@pytest.mark.parametrize(
    ("words", "device", "ranks", "line", "end"),
    [
        (["criterion.supervised_epochs=plateau"], "cpu", 1, "steps", "until that has plateaued"),
        ([], "cpu", 2, "norm", "the whole batch, shared by 2 processes (RankBatchNorm)"),
        (["model.sync_batchnorm=false"], "cpu", 2, "norm", "in the whole batch; the paper shares them"),
        (TF32, "cuda", 1, "loss", ", products in TF32"),
        (TF32, "cpu", 1, "loss", "by sample"),
        ([*TF32, *SWAV_ALONE], "cuda", 1, "loss", "temperature 0.2"),  # no keys, no anchors, no products
        (LABELS_ALONE, "cpu", 1, "loss", "cross-entropy"),
        (LAYER_NORM, "cpu", 2, "norm", "no BatchNorm in this network"),
    ],
)
def test_summary_line_of_a_config_and_its_place(lines_of, words, device, ranks, line, end):
    assert lines_of(digits(*words), device, ranks)[line].endswith(end)
