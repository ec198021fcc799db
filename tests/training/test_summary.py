"""The lines that are printed before a run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.distributed.place import Place
from fastsuncet.training import summary
from tests.support.runs import CONFIGS


@pytest.mark.parametrize(
    ("asked", "problem", "why"),
    [
        ("torchvision", None, "as configured"),
        ("torchvision", "No module named 'nvidia'", "as configured"),
        ("auto", "libcuda.so: not found", "DALI cannot be used here: libcuda.so: not found"),
    ],
)
def test_pixel_source_says_why_it_is_not_dali(monkeypatch, asked, problem, why):
    monkeypatch.setattr(summary, "dali_problem", lambda: problem)
    stream = SimpleNamespace(options=SimpleNamespace(backend="torchvision"))
    assert summary.pixel_source(stream, asked) == f"torchvision on the CPU ({why})"


class ManyImages:
    """1,281,167 images, of one size, without files."""

    sizes = np.full((7, 2), (400, 500))

    def __len__(self) -> int:
        return 1_281_167


def test_summary_says_what_pieces_cost_and_what_batchnorm_sees():
    """4,096 images on one process: 364 GB at once, the memory of 512 views and all pixels in pieces."""
    found = {}
    for name, asked in (("whole", ()), ("pieces", ("criterion.micro_batch=512",))):
        config = load_config(CONFIGS / "in1k_simclr.yaml", ["data.root=none", "meta.precision=bf16", *asked])
        sizes = config.resolve(1, 1_281_167)
        images = SimpleNamespace(train=ManyImages(), split="none")
        lines = summary.summary(config, Place(0, 1, torch.device("cpu")), images, sizes, None)
        found[name] = dict(line.split(maxsplit=1) for line in lines), summary.step_memory(config, sizes)
    (whole, memory), (pieces, less) = found["whole"], found["pieces"]
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
def test_summary_counts_images_on_a_gpu_where_dali_decodes_there(monkeypatch, asked, problem, where):
    """28 GB of a step and 26 GB of images, beside a GPU of 40 GB."""
    monkeypatch.setattr(summary, "dali_problem", lambda: problem)
    monkeypatch.setattr(summary, "memory_of", lambda _: 40 * 10**9)
    monkeypatch.setattr(summary, "device_name", lambda *_: "a GPU")
    words = ["data.root=none", "meta.precision=bf16", "criterion.micro_batch=512", f"data.backend={asked}"]
    config = load_config(CONFIGS / "in1k_simclr.yaml", words)
    place = Place(0, 1, torch.device("cuda", 0))
    lines = summary.summary(config, place, None, config.resolve(1, 1_281_167), None)
    (memory,) = (line for line in lines if line.startswith("memory"))
    assert f" GB {where}for the images" in memory and ("WHICH IS LESS" in memory) == (not where)


def test_device_name_has_the_threads_of_the_config():
    place, configs = Place(0, 1, torch.device("cpu")), (CONFIGS / "digits_demo.yaml", ["meta.threads=7"])
    assert summary.device_name(load_config(*configs), place) == "CPU, 7 threads"


def test_norm_note_says_whose_statistics_a_run_uses():
    note = summary.norm_note
    assert note(8, shared=True) == "statistics of the whole batch, shared by 8 processes (RankBatchNorm)"
    assert note(1, shared=True) == note(1, shared=False) == "statistics of the whole batch"
    assert "each process's own images" in note(2, shared=False)


SWAV_ALONE = ("criterion.supervision=cross_entropy", "criterion.instance=swav", "swav.small_crops=0")


@pytest.mark.parametrize(
    ("device", "precision", "products", "method", "note"),
    [
        ("cuda", "bf16", "tf32", (), ", products in TF32"),
        ("cuda", "fp32", "tf32", (), ""),
        ("cuda", "bf16", "fp32", (), ""),
        ("cpu", "bf16", "tf32", (), ""),
        ("cuda", "bf16", None, SWAV_ALONE, ""),  # these losses have no such product
    ],
)
def test_tf32_note_is_there_where_losses_are_not_in_float32(device, precision, products, method, note):
    asked = [f"meta.precision={precision}", *method]
    asked += [f"criterion.products={products}"] if products else []
    config = load_config(CONFIGS / "digits_demo.yaml", asked)
    assert summary.tf32_note(config, Place(0, 1, torch.device(device))) == note


@pytest.mark.parametrize(
    ("device", "processes", "feed", "there", "less"),
    [
        ("cpu", 1, 1, "this machine has 8 GB", False),
        ("cpu", 2, 1, "this machine has 8 GB", True),
        ("cuda", 2, 1, "the GPU has 8 GB", False),
        ("cuda", 1, 5, "the GPU has 8 GB", True),
    ],
)
def test_memory_note_compares_all_that_shares_a_memory_with_it(
    monkeypatch, device, processes, feed, there, less
):
    """The processes of a CPU share it; a GPU has one process, which also decodes there."""
    monkeypatch.setattr(summary, "memory_of", lambda _: 8 * 10**9)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    place = Place(0, 1, torch.device(device))
    note = summary.memory_note(place, 4 * 10**9, feed * 10**9, processes)
    assert (note == there) != less and note.startswith(there)
