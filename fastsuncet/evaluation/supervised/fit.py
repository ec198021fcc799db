"""Training an encoder and a new classifier on labeled images: the engine of fine-tuning and of transfer.

The protocol is the paper's (appendix B): all weights are trained by SGD with Nesterov momentum, without LARS and
warm-up, the learning rate falls along half a cosine to 0, an image is cropped at random and flipped, and BatchNorm
normalises over each process's own images.
"""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.distributed.collectives import broadcast
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.supervised.loop import Fitter
from fastsuncet.evaluation.supervised.setting import FitSetting, require_batch
from fastsuncet.evaluation.supervised.state import identity_of
from fastsuncet.metrics.cost import RunCost
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Center

__all__ = ["FitResult", "FitSetting", "fit"]

REMEDY = "Set these back to continue it, or remove that folder to begin again."


@dataclass(frozen=True, eq=False)
class FitResult:
    """A finished fit."""

    # (N, C) float32 on the device, the same on every rank: every validation image once, in order
    logits: Tensor
    loss: float  # mean over the last metrics interval
    accuracy: float  # on the training images' random crops, over the same interval
    ledger: RunCost  # of the fit alone, all its lives together


def fit(
    encoder: Encoder,  # its module is trained, in place
    train: ImageIndex,
    indices: np.ndarray,  # int64 - the images of `train` to learn from
    validation: ImageIndex,
    validation_indices: np.ndarray,  # (N,) int64
    setting: FitSetting,
    place: Place,
    folder: Path,  # checkpoints/, metrics.jsonl, metrics.csv: a fit that was stopped continues from there
    config: Config,  # how to compute and to read pixels: meta, data, logging
    *,
    signals: SignalFlag | None = None,  # None: watches signals itself
    # names and values that must not change in `folder`; None: the setting's
    identity: dict[str, Any] | None = None,
    remedy: str = REMEDY,
) -> FitResult:
    """Trains to `setting.steps` and returns the logits of the validation images. Collective.

    A step is a function of (seed, step) and the files, so the same call continues to the same bits after a stop at any
    step, or a kill. A signal that comes in training raises Preempted once all is saved. Raises ConfigError for a batch
    that does not fit, CheckpointError where `folder` holds a fit of other settings or a disk refuses, NumericalError
    for a loss or a weight that is no number, BadImage.
    """
    require_batch(setting, len(indices), place)
    numbers = asdict(setting) if identity is None else identity
    numbers = {key: value for key, value in numbers.items() if key != "save_every"}
    identity = identity_of(numbers, encoder, train, indices, config)
    with _watched(signals) as signals:
        fitter = Fitter(encoder, train, indices, setting, place, folder, config, identity, remedy)
        try:
            fitter.run(signals)
        finally:
            fitter.stream.close()
        for buffer in fitter.model.buffers():  # each rank's own so far; rank 0's are the ones that are saved
            broadcast(buffer)
        view = Center(setting.size, setting.resize, setting.mean, setting.std)
        logits = outputs(fitter.model, validation, validation_indices, config, place, view=view)
    return FitResult(logits, *fitter.reached, fitter.ledger)


@contextlib.contextmanager
def _watched(signals: SignalFlag | None) -> Iterator[SignalFlag]:
    """`signals`, or a flag of our own: what came too late to stop training goes to whoever watched before us."""
    if signals is not None:
        yield signals
        return
    with SignalFlag() as own:
        yield own
    if own.requested is not None:
        signal.raise_signal(signal.Signals[own.requested])
