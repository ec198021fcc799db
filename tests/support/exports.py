"""A saved run of a ResNet-18."""

import functools
from pathlib import Path

import torch

from fastsuncet.config import load_config
from fastsuncet.models.resnet import build_model
from tests.support.checkpoints import save_model
from tests.support.runs import CONFIGS

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
CLASSES = [f"class {i}" for i in range(4)]
NORMALIZED = ("data.augmentation.mean=[0.5, 0.4, 0.3]", "data.augmentation.std=[0.2, 0.3, 0.4]")
SIZE = "data.augmentation.size=112"


@functools.cache
def built(name="resnet_tiny", stem="imagenet", classes: int | None = None) -> torch.nn.Module:
    """Return a model whose BatchNorm statistics are not the initial ones."""
    model = build_model(name, stem, 32, 16, classes=classes, seed=3)
    model.train()(IMAGES)
    return model.eval()


def features(module: torch.nn.Module) -> torch.Tensor:
    """Return what the module makes of `IMAGES` in evaluation mode."""
    with torch.no_grad():
        return module.eval()(IMAGES)


SIMCLR = {"source": "a", "step": 5, "epoch": 1.0, "method": "SimCLR", "ledger": {"updates": 5}}


def save_run(
    folder: Path, *overrides: str, classes: int | None = None, encoder: dict = SIMCLR
) -> torch.nn.Module:
    """Save one checkpoint in `folder` and return its model; with `classes` it is a fine-tuning's of `encoder`."""
    words = ["model.name=resnet18", f"logging.folder={folder.parent}", *NORMALIZED, SIZE, *overrides]
    config = load_config(CONFIGS / "in1k_10pct.yaml", [*words, f"logging.write_tag={folder.name}"])
    model = built(config.model.name, config.model.stem, classes)
    meta = {"classes": CLASSES[:classes], "encoder": encoder} if classes else {}
    save_model(folder, config, model, 7, **meta)
    return model
