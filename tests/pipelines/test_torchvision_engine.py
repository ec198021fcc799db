"""The torchvision engine reads ahead. Its pixels are compared with DALI's in dali/test_graphs.py."""

import threading
from itertools import permutations

import torch
from torchvision.transforms.v2 import functional as F

from pipelines import torchvision_engine
from pipelines.datasets.index import ImageIndex
from tests.support.streams import opened, unlabeled


def test_torchvision_engine_reads_ahead_and_each_file_once_a_step(index, monkeypatch):
    threads, read = [], ImageIndex.rgb
    current = threading.current_thread
    monkeypatch.setattr(ImageIndex, "rgb", lambda self, i: threads.append(current()) or read(self, i))
    loader = opened(unlabeled(index), "torchvision", prefetch=2)
    for step in range(3):
        loader(step)
    pool = loader._engine._pool
    pool.shutdown(wait=True)
    # Threads of another test's loader can still be at work; they do not count.
    assert sum(thread in pool._threads for thread in threads) == 6 * 4


def test_jitter_applies_the_documented_order_of_operations():
    """Docs/recipe.md, section 2.1: brightness, contrast, saturation, hue. Every other order gives other pixels."""
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    factors = {"brightness": 1.5, "contrast": 0.6, "saturation": 1.7, "hue": 0.1}

    def applied(order):
        pixels = image
        for name in order:
            pixels = getattr(F, f"adjust_{name}")(pixels, factors[name])
        return pixels

    documented = ("brightness", "contrast", "saturation", "hue")
    ours = torchvision_engine.jitter(image, **factors)
    same = [order for order in permutations(documented) if torch.equal(applied(order), ours)]
    assert same == [documented]
