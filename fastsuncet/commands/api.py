"""Functions for notebooks and other programs: train a config, load an encoder, embed a folder of images."""

from pathlib import Path

import numpy as np
from torch import nn

from fastsuncet.commands import embed as command
from fastsuncet.commands import train as train_command
from fastsuncet.config import Config
from fastsuncet.distributed import launch
from fastsuncet.errors import ConfigError
from fastsuncet.evaluation import encoder as encoders
from pipelines.datasets.folders import image_tree
from pipelines.sampling.augmentation import Center


def train(config: Config) -> Path:
    """Train as `config` says, or continue its run, and return the run's folder.

    This process is the only rank, on one GPU where there is one; under torchrun or Slurm it joins the others. It must
    be the main thread, because SIGTERM and Ctrl-C then save the run and raise Preempted. Raises ConfigErrors,
    ConfigError, DataError, NumericalError and CheckpointError, as `fastsuncet train` tells them.
    """
    train_command.train_here(config)
    return config.run_folder


def load_encoder(path: str | Path) -> nn.Module:
    """Return the encoder in `path` on the CPU in eval mode: (B, 3, S, S) float32, normalized -> features (B, width).

    `path` is a run's folder (its newest good checkpoint is taken), one checkpoint, a fine-tuning, an export other than
    ONNX, or a file of weights of torchvision, timm or the authors. Projection head and classifier are dropped; every
    parameter takes gradients. `encoder.view` says which pixels it expects, a `Center` (size, resize, mean, std), or
    None for a file of another program. Raises ConfigError for what does not exist, CheckpointError for what does not
    fit.
    """
    loaded = encoders.load_encoder(Path(path))
    module = loaded.module.eval()
    setattr(module, "view", loaded.view)  # noqa: B010 - torch's stubs know only tensors and modules as attributes
    return module


def embed(
    encoder: nn.Module, folder: str | Path, *, view: Center | None = None, batch: int = 256
) -> tuple[list[str], np.ndarray]:
    """Return (file names, features (N, width) float32) of the N images below `folder`, in order of their names.

    Computed on the encoder's device without gradients, with the code of `fastsuncet evaluate`: the center crop `view`
    (by default `encoder.view`) and BatchNorm in eval mode. `fastsuncet embed` does the same into a file and can be
    continued. Raises ConfigError for an encoder without a view, DataError for no images or a bad one.
    """
    view = view or getattr(encoder, "view", None)
    if view is None:
        raise ConfigError(
            "nothing says which pixels this encoder expects: pass view=Center(size, resize, mean, std)"
        )
    index = image_tree(folder)
    place = launch.Place(0, 1, 0, next(encoder.parameters()).device)
    rows = [rows for _, rows in command.features(encoder, index, view, place, batch=batch)]
    return [index.name(i) for i in range(len(index))], np.concatenate(rows)
