"""The loop of a supervised fit: runs updates to a count, and can be stopped and continued anywhere to the same bits."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.console import say_line
from fastsuncet.distributed.collectives import any_rank, gather_json
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.distributed.stop_consensus import StopConsensus
from fastsuncet.errors import NumericalError, Preempted
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.supervised import state as fit_state
from fastsuncet.evaluation.supervised.network import (
    TERMS,
    Classifier,
    fit_step,
    set_batchnorm_momentum,
    trained,
)
from fastsuncet.evaluation.supervised.setting import FitSetting
from fastsuncet.evaluation.supervised.stream import FitStream
from fastsuncet.metrics.cost import RunCost
from fastsuncet.metrics.interval import MetricsInterval
from fastsuncet.models.flops import classifier_macs
from fastsuncet.optim import warmup_cosine
from fastsuncet.training.logger import Reporter
from fastsuncet.training.state import require_finite_weights
from fastsuncet.training.step import PRECISIONS
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Augmentation

COLUMNS = (
    *("epoch", "cross_entropy", "train_accuracy", "lr", "views_per_second", "data_wait", "replaced_images"),
    *("images", "updates", "petaflops", "seconds"),
)
LINES = 100  # of metrics in a fit, at most: a grid of transfers has dozens of fits


class Fitter:
    """One rank's fit, from its newest checkpoint to its last step."""

    def __init__(
        self,
        encoder: Encoder,
        train: ImageIndex,
        indices: np.ndarray,
        setting: FitSetting,
        place: Place,
        folder: Path,
        config: Config,
        identity: dict[str, Any],
        remedy: str,
    ):
        self.encoder, self.setting, self.place, self.folder = encoder, setting, place, folder
        self.config, self.identity = config, identity
        s, device = setting, place.device
        self.model = Classifier(encoder.module, encoder.width, s.num_classes)
        if s.bn_momentum is not None:
            set_batchnorm_momentum(self.model, s.bn_momentum)
        layout = torch.channels_last if config.meta.channels_last else None
        self.model = self.model.to(device, memory_format=layout).train()
        dtype = PRECISIONS[s.precision]
        self.autocast = partial(torch.autocast, device.type, dtype=dtype, enabled=dtype != torch.float32)
        self.network = trained(self.model, config, place, s.size, self.autocast)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=s.lr,
            momentum=s.momentum,
            nesterov=s.nesterov,
            weight_decay=s.weight_decay,
            fused=True,  # one launch for all weights, and fp16's scaler need not ask the device whether to step
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        view = Augmentation(
            size=s.size,
            crop_scale=s.crop_scale,
            crop_ratio=s.crop_ratio,
            flip=s.flip,
            jitter=0.0,
            grey=0.0,
            blur=0.0,
            mean=s.mean,
            std=s.std,
        )
        several = s.loss == "sigmoid"
        sizes = {"batch": s.batch, "passes": s.accumulate, "seed": s.seed}
        self.interval, self.ledger = MetricsInterval(device), RunCost()
        sizes["wait"] = self.interval.data_timer
        self.stream = FitStream(train, indices, view, config, place, several=several, **sizes)
        self.macs = s.batch * classifier_macs(
            encoder.name, encoder.stem, s.size, encoder.width, s.num_classes
        )
        self.every = max(config.logging.log_every, -(-s.steps // LINES))  # steps
        parts = self.parts()
        self.step, extra = fit_state.restore(folder, **parts, remedy=remedy, say=say_line)
        self.replaced: set[int] = set(extra.get("replaced", []))
        self.reached: tuple[float, float] = tuple(extra.get("reached", (float("nan"), float("nan"))))

    def run(self, signals: SignalFlag) -> None:
        """Trains to the last step. Raises Preempted once saved on a signal."""
        steps = self.setting.steps
        if self.step == steps:  # stopped after its last step and before its evaluation
            return
        with Reporter(self.config, self.folder, steps, self.step, self.place, COLUMNS) as self.out:
            consensus = StopConsensus()
            self.ledger.start_clock()
            self.interval.start_clock()
            terms = TERMS[self.setting.loss]
            while self.step < steps:
                told = fit_step(
                    self.network,
                    self.optimizer,
                    self.scaler,
                    self.autocast,
                    terms,
                    self.stream,
                    self.step,
                    self.lr(self.step),
                )
                self.interval.add(told, self.step, self.setting.batch)
                self.step += 1  # from here on, the updates done
                self.ledger.add(self.setting.batch, self.macs)
                last = self.step == steps
                stop = consensus.agree(signals.requested is not None) and not last
                if last or self.step % self.every == 0:
                    self.log()
                if last or stop or self.step % self.setting.save_every == 0:
                    self.save(keep=1 if last else 2)
                if stop:
                    raise Preempted(self._asked(signals))
            consensus.close()
        if any_rank(signals.requested is not None):
            raise Preempted(self._asked(signals))  # whoever asked to stop may not wait for an evaluation

    def _asked(self, signals: SignalFlag) -> str:
        asked = signals.requested or "another rank"
        return f"{asked}: saved after step {self.step:,}; the same command continues"

    def lr(self, step: int) -> float:
        """Half a cosine from `setting.lr` at update 0 to 0, one past the last update."""
        return warmup_cosine(step, steps=self.setting.steps, warmup_steps=0, start_lr=0.0, lr=self.setting.lr)

    def log(self) -> None:
        """A metrics line: means over the steps and ranks of the interval."""
        sums, first_bad, wait = self.interval.read()
        self.refuse_nonfinite(first_bad)
        loss, accuracy = (sums.mean(0) / self.interval.steps).tolist()
        self.reached = (loss, accuracy)
        self.ledger.tick()
        seconds = self.interval.seconds()
        record = {
            "step": self.step,
            "epoch": round(self.step / self.stream.steps_per_epoch, 4),
            "cross_entropy": loss,
            "train_accuracy": accuracy,
            "lr": self.lr(self.step - 1),
            "views_per_second": round(self.interval.views / seconds, 1),
            "data_wait": round(min(1.0, wait / seconds), 4),
            "replaced_images": self.count_replaced(),
            **self.ledger.record(),
        }
        self.out.write("train", record)
        self.interval.restart()

    def count_replaced(self) -> int:
        """How many distinct images could not be decoded so far, on any rank."""
        if self.config.data.bad_images:
            self.replaced.update(i for rank in gather_json(sorted(self.stream.replaced)) for i in rank)
        return len(self.replaced)

    def save(self, keep: int) -> None:
        """A checkpoint, unless a loss or a weight is no number."""
        sums, first_bad, _ = self.interval.read()
        self.refuse_nonfinite(first_bad)
        require_finite_weights(self.model, self.step)
        self.count_replaced()
        self.ledger.tick()
        self.out.sync()
        extra = {"replaced": sorted(self.replaced), "reached": list(self.reached)}
        fit_state.save(
            self.folder,
            self.step,
            **self.parts(),
            sums=sums,
            extra=extra,
            encoder=self.encoder,
            config=self.config,
            keep=keep,
            say=self.out.say,
        )

    def parts(self) -> dict[str, Any]:
        """What is saved and restored."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "interval": self.interval,
            "ledger": self.ledger,
            "identity": self.identity,
            "place": self.place,
        }

    def refuse_nonfinite(self, first_bad: Tensor) -> None:
        """Raises NumericalError on every rank if any rank saw a loss that is no number; (W, T) first bad steps."""
        if (first_bad < 0).all():
            return
        step = int(first_bad[first_bad >= 0].min())
        names = [name for rank in gather_json(self.stream.files(step)[:5]) for name in rank]
        raise NumericalError(
            f"the loss is not a finite number at step {step:,}. Nothing has been saved since. A lower learning rate or "
            "precision fp32 are the usual cures. Among the images of that step: " + ", ".join(names[:20])
        )
