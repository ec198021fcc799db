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


@pytest.mark.parametrize(
    ("asked", "problem", "why"),
    [
        ("torchvision", "No module named 'nvidia'", "as configured"),
        ("auto", "libcuda.so: not found", "DALI cannot be used here: libcuda.so: not found"),
    ],
)
def test_summary_says_why_pixels_are_not_dalis(lines_of, monkeypatch, asked, problem, why):
    monkeypatch.setattr(summary, "dali_problem", lambda: problem)
    stream = SimpleNamespace(options=SimpleNamespace(backend="torchvision", view_operator=False))
    found = lines_of(digits(f"data.backend={asked}"), stream=stream)
    assert found["pixels"] == f"torchvision on the CPU ({why})"


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
    ("asked", "problem", "where"),
    [("auto", None, ""), ("torchvision", None, "on the CPU "), ("auto", "no DALI", "on the CPU ")],
)
def test_summary_counts_images_on_a_gpu_where_dali_decodes_there(
    lines_of, monkeypatch, asked, problem, where
):
    """28 GB of a step and 26 GB of images, beside a GPU of 40 GB."""
    monkeypatch.setattr(summary, "dali_problem", lambda: problem)
    memory = lines_of(paper("criterion.micro_batch=512", f"data.backend={asked}"), "cuda")["memory"]
    assert f" GB {where}for the images" in memory and ("WHICH IS LESS" in memory) == (not where)
    assert "; the GPU has 40 GB" in memory


@pytest.mark.parametrize(
    ("device", "ranks", "less"), [("cpu", 1, False), ("cpu", 2, True), ("cuda", 2, False)]
)
def test_summary_compares_all_that_shares_a_memory_with_it(lines_of, monkeypatch, device, ranks, less):
    """The processes of a CPU share it; a GPU has one process."""
    config = digits()
    sizes = config.resolve(ranks, IMAGES)
    need = summary.step_memory(config, sizes).total + summary.feed_memory(config, sizes, None)
    monkeypatch.setattr(summary, "memory_of", lambda _: 1.5 * need)
    monkeypatch.setattr(summary, "dali_problem", lambda: None)
    assert ("WHICH IS LESS" in lines_of(config, device, ranks)["memory"]) == less


SWAV_ALONE = ("criterion.supervision=cross_entropy", "criterion.instance=swav", "swav.small_crops=0")
TF32 = "criterion.products=tf32"


@pytest.mark.parametrize(
    ("words", "device", "ranks", "line", "end"),
    [
        (["meta.threads=7"], "cpu", 1, "device", f"CPU, 7 threads, fp32, torch {torch.__version__}"),
        ([], "cpu", 2, "norm", "the whole batch, shared by 2 processes (RankBatchNorm)"),
        (
            ["model.sync_batchnorm=false"],
            "cpu",
            2,
            "norm",
            "own images in the whole batch; the paper shares them",
        ),
        (["meta.precision=bf16", TF32], "cuda", 1, "loss", ", products in TF32"),
        (["meta.precision=fp32", TF32], "cuda", 1, "loss", "by sample"),
        (["meta.precision=bf16", "criterion.products=fp32"], "cuda", 1, "loss", "by sample"),
        (["meta.precision=bf16", TF32], "cpu", 1, "loss", "by sample"),
        (["meta.precision=bf16", *SWAV_ALONE], "cuda", 1, "loss", "by sample"),  # it has no such product
    ],
)
def test_summary_line_of_a_config_and_its_place(lines_of, words, device, ranks, line, end):
    assert lines_of(digits(*words), device, ranks)[line].endswith(end)
