"""Training an encoder and a new classifier on labeled images, for the commands finetune and transfer.

The protocol is the paper's (appendix B): all weights are trained by SGD with Nesterov momentum, without LARS and
warm-up; the learning rate falls along half a cosine to 0; an image is cropped at random and flipped; BatchNorm
normalizes over each process's own images.

Shapes: B images of (3, S, S) an update over W ranks in A passes each, m = B / (W A) a pass, logits (m, C).
"""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import loader_options
from fastsuncet.distributed.collectives import any_rank, broadcast
from fastsuncet.distributed.ddp import parallel
from fastsuncet.distributed.place import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.evaluation.encoder import Encoder, linear_layer
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.finetuning.record import fit_identity, refuse_changed, sizes
from fastsuncet.metrics.interval import DataTimer
from fastsuncet.models.flops import classifier_macs
from fastsuncet.optim import SGD, warmup_cosine
from fastsuncet.training.determinism import PRECISIONS
from fastsuncet.training.task import COST, SPEED, TrainingTask
from fastsuncet.training.trainer import Trainer
from pipelines.backend import to_device
from pipelines.datasets.index import ImageIndex
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation, Center
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan

# A classifier of features h that starts from a linear fit needs rates below about 1 / mean of |h|^2: at larger ones it
# forgets the fit in its first updates. That is so for any unit of the features.
STABLE = 1.0
# Most of the gradient's norm there: a strong classifier's weights are large, and with them the encoder's gradients. In
# two updates those took an encoder from 51 to 38 % (RESULTS.md).
CLIP = 1.0
LINES = 100  # of metrics per fit, at most: a transfer grid has dozens of fits
BATCHES = 10  # that new statistics of BatchNorm are the mean of
ROLE = "fit"  # of the random draws: independent of those of pre-training
SAVES = 20  # per fit, at most: a kill then costs a twentieth of it


class FineTuningStream:
    """`stream(step, part)` is what one pass learns from: a pure function of (seed, step, part, rank) and the files."""

    def __init__(self, index: ImageIndex, indices: np.ndarray, config: Config, place: Place):
        """Show the images `indices`, int64, as the sections finetune and data of `config` say."""
        f, a, seed = config.finetune, config.data.augmentation, config.meta.seed
        shown = {"size": a.size, "crop_scale": f.crop_scale, "crop_ratio": a.crop_ratio, "flip": a.flip}
        view = Augmentation(**shown, blur=0.0, mean=a.mean, std=a.std).uncolored
        self.passes, self._index, self._place = f.accumulate, index, place
        shares = place.world_size * self.passes
        sampler = UnlabeledSampler(len(indices), sizes(config)[0], shares, seed, indices)
        self.steps_per_epoch = sampler.steps_per_epoch
        draws = {"seed": seed, "role": ROLE, "passes": self.passes}
        self._plans = [Plan(index, sampler, (view,), rank=rank, **draws) for rank in range(place.world_size)]
        plan = self._plans[place.rank]
        self._loader = Loader(plan, loader_options(config, place), bad_images=config.data.bad_images)

    def __call__(self, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Return images (m, 3, S, S) and targets: labels int64 (m,), or presence int8 (m, C)."""
        number = step * self.passes + part
        (images,) = self._loader(number)
        # Asked for after the images: a bad one can be replaced by one of another class.
        draws = self._loader.draws(number)
        presence = self._index.presence
        targets = draws.labels if presence is None else presence[draws.indices]
        device = self._place.device
        return to_device(images, device), to_device(torch.from_numpy(targets), device)

    def files(self, step: int, rank: int, role: str = ROLE) -> list[str]:
        """Return the names of the images of one rank's part of a step."""
        passes = [self._plans[rank](step * self.passes + part) for part in range(self.passes)]
        return [self._index.name(int(i)) for draws in passes for i in draws.indices]

    @property
    def replaced(self) -> set[int]:
        """The bad images that this rank has met and replaced by others."""
        return set(self._loader.replaced)

    def close(self) -> None:
        """Free threads and buffers."""
        self._loader.close()


def measure_statistics(network: nn.Module, stream: FineTuningStream, steps: int) -> None:
    """Set BatchNorm's statistics to the mean of those of BATCHES batches, the ones after the last of `steps`."""
    update_bn((stream(steps + i, 0) for i in range(BATCHES)), network)


@dataclass(frozen=True)
class Frozen:
    """A linear classifier of frozen features, and what it and the nearest neighbors recognize without training."""

    module: nn.Module  # what to start from: the encoder, with new statistics where its own are stale
    stale: bool
    weight: Tensor  # (C, E) float32, of raw features of `module`: the standardization is folded in
    bias: Tensor  # (C,) float32
    square: float  # mean of |h|^2 over the labeled images
    # Top-1 of the encoder as it is on the validation images, 0 to 1: linear; knn, whose neighbors are center crops; and
    # knn_random_crops, as in the paper. Empty where there are none.
    accuracies: dict[str, float]


def softmax_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean cross-entropy, fraction of the images whose highest logit is their class's); labels int64 (m,)."""
    right = logits.detach().argmax(1) == labels
    return F.cross_entropy(logits, labels), right.float().mean()


def sigmoid_loss(logits: Tensor, presence: Tensor) -> tuple[Tensor, Tensor]:
    """Return (binary cross-entropy, fraction of right answers), each a mean over all m C entries of `presence`.

    A class with entry 1 is in the image, one with -1 is not. One with 0 is not annotated: it counts as no loss and no
    right answer, so the parts of a batch have the mean of the whole whatever is annotated in each.
    """
    known, present = presence != 0, presence > 0
    loss = F.binary_cross_entropy_with_logits(logits, present.float(), weight=known.float())
    right = known & ((logits.detach() > 0) == present)
    return loss, right.float().mean()


class FineTuning(TrainingTask[Iterator[tuple[Tensor, Tensor]]]):
    """An encoder and a new classifier on the images `indices` of `train`.

    An index with `presence` has several classes an image: the loss is then a sigmoid's. Else it is the softmax's.
    """

    stream: FineTuningStream
    terms = ("cross_entropy", "train_accuracy")
    columns = ("epoch", *terms, *SPEED, *COST)
    roles = (ROLE, ROLE)
    batch_key, pieces_key = "finetune.batch_size", "finetune.accumulate"
    keep, keep_at_end = 2, 1
    ledger_key = "fit_ledger"  # "ledger" is that of the pre-training
    world_size_note = (
        "the same images an update, but BatchNorm over other parts of them, so results are those of neither number "
        "alone"
    )

    def __init__(
        self,
        encoder: Encoder,  # its module is copied
        train: ImageIndex,
        indices: np.ndarray,  # int64 - the images of `train` to learn from
        config: Config,  # of `with_sizes`: finetune, and how to compute and to read pixels: meta, data, logging
        place: Place,
        folder: Path,  # of checkpoints/, metrics.jsonl and metrics.csv; a fit that was stopped continues from there
        *,
        steps: int,  # updates
        frozen: Frozen | None = None,  # the classifier starts from its weights; None: at zero
        # torch's, the fraction of the running statistics that a batch replaces; None: the encoder's
        bn_momentum: float | None = None,
        also: Mapping[str, Any] = {},  # what must not change in `folder`, besides that of `fit_identity`
    ):
        self.encoder, self.place, self.config, self.steps = encoder, place, config, steps
        self.folder, self.identity = folder, fit_identity(config, encoder, train, indices, **also)
        self.classes = list(train.classes)
        f, a = config.finetune, config.data.augmentation
        (self.images, lr), classes = sizes(config), len(train.classes)
        # At zero all classes begin equally likely (paper, appendix B). The authors' first release does not mention the
        # bias, and leaves it at torch's random initial value.
        module, weight, bias = encoder.module, torch.zeros(classes, encoder.width), torch.zeros(classes)
        if frozen is not None:
            module, weight, bias = frozen.module, frozen.weight, frozen.bias
        layer = linear_layer(weight, bias)
        self.model = nn.Sequential(OrderedDict(encoder=copy.deepcopy(module), classifier=layer))
        for layer in self.model.modules() if bn_momentum is not None else ():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.momentum = bn_momentum
        layout = torch.channels_last if config.meta.channels_last else torch.preserve_format
        # Torch's stubs lack memory_format.
        self.model.to(place.device, memory_format=layout).train()  # pyright: ignore[reportCallIssue]
        dtype = PRECISIONS[config.meta.precision]
        self.autocast = partial(
            torch.autocast, place.device.type, dtype=dtype, enabled=dtype != torch.float32
        )
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=dtype == torch.float16)
        self.loss = softmax_loss if train.presence is None else sigmoid_loss

        def blank(network: nn.Module) -> Tensor:
            with self.autocast():
                logits = network(torch.zeros(2, 3, a.size, a.size, device=place.device))
            return logits.float().sum()

        # BatchNorm and its running statistics are each rank's own, as in the paper; rank 0's are saved and evaluated.
        # The graph is not static: all passes of an update but the last leave out the exchange of gradients.
        self.network = parallel(
            self.model, place, compiled=config.meta.compile, static_graph=False, blank_pass=blank
        )
        # Averaged with the last weights (`after_step`). None: the last weights stay.
        self.start = None if frozen is None else [x.clone() for x in self.averaged()]
        self.stale = frozen is not None and frozen.stale
        # The features' scale decides the bound, so a resume must not measure it anew: the optimizer's state keeps it.
        scale = 1.0 if frozen is None else min(1.0, STABLE / (frozen.square * lr))
        # Fused: one launch for all weights, and fp16's scaler need not ask the device whether to step.
        groups = [{"params": list(self.model.parameters()), "scale": scale}]
        self.optimizer = SGD(
            groups, lr, momentum=f.momentum, nesterov=f.nesterov, weight_decay=f.weight_decay
        )
        self.stream = FineTuningStream(train, indices, config, place)
        self.steps_per_epoch = self.stream.steps_per_epoch
        # Half a cosine: finetune.lr at update 0, and 0 one past the last update.
        self.lr = partial(warmup_cosine, steps=steps, warmup_steps=0, start_lr=0.0, lr=lr)
        # Every epoch, unless that is too often: with few labels an epoch is an update or two.
        self.save_every = (max(self.steps_per_epoch, -(-steps // SAVES)),)
        self.log_every = max(config.logging.log_every, -(-steps // LINES))
        self.macs = self.images * classifier_macs(encoder.name, encoder.stem, a.size, encoder.width, classes)

    def batch(self, step: int, timer: DataTimer) -> Iterator[tuple[Tensor, Tensor]]:
        for part in range(self.config.finetune.accumulate):
            timer.begin()
            images, targets = self.stream(step, part)
            timer.end()
            yield images, targets

    def train_step(self, batch: Iterator[tuple[Tensor, Tensor]], lr: float) -> Tensor:
        """Make one update. Return this rank's loss and fraction of right answers, (2,), on the device. No host sync.

        Gradients of all passes add up, and ranks exchange them in the last pass only.
        """
        passes, total = self.config.finetune.accumulate, torch.zeros(2, device=self.place.device)
        ddp = self.network if isinstance(self.network, nn.parallel.DistributedDataParallel) else None
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        for part, (images, targets) in enumerate(batch):
            with ddp.no_sync() if ddp and part < passes - 1 else contextlib.nullcontext():
                with self.autocast():
                    logits = self.network(images)
                loss, right = self.loss(logits.float(), targets)
                self.scaler.scale(loss / passes).backward()
            total += torch.stack([loss.detach(), right]) / passes
        if self.start is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def averaged(self) -> list[Tensor]:
        """Return the weights and the BatchNorm statistics of the network."""
        return [x.detach() for x in self.model.state_dict().values() if x.is_floating_point()]

    @torch.no_grad()
    def after_step(self, step: int, values: Tensor) -> str | None:
        """After the last update average the weights with those of the start, if that was the linear classifier.

        Few labels train the network away from features that were better, and the mean keeps them. Half of each is what
        WiSE-FT recommends (Wortsman et al. 2022, 2109.01903).
        """
        if self.start is not None and step + 1 == self.steps:
            for now, start in zip(self.averaged(), self.start, strict=True):
                now.lerp_(start, 0.5)
            # A young encoder moves far, and the mean of two statistics is then not that of the mean weights.
            if self.stale:
                with self.autocast():
                    measure_statistics(self.model, self.stream, self.steps)

    def cost(self, step: int) -> tuple[int, int]:
        return self.images, self.macs

    def meta(self, epoch: float) -> dict[str, Any]:
        """Describe the network that is in the checkpoint: config.model of the fine-tuning can be another one.

        The ledger and epoch are those of the pre-training, which an evaluation of this encoder is compared by.
        """
        config = self.config.canonical()
        config["model"] |= {"name": self.encoder.name, "stem": self.encoder.stem}
        return {
            "config": config,
            "ledger": self.encoder.ledger,
            "epoch": self.encoder.epoch,
            "classes": self.classes,
            "encoder": self.encoder.record(),
            "fit": self.identity,
        }

    def check_resume_compatible(self, meta: dict[str, Any]) -> None:
        refuse_changed(meta.get("fit", {}), self.identity, self.folder)


def fit(
    task: FineTuning,
    evaluated: ImageIndex | None,  # None: nothing is evaluated
    indices: np.ndarray,  # int64 (N,), of `evaluated`
    signals: SignalFlag,
    view: Center | None = None,  # of an evaluated image; None: the config's
) -> tuple[Tensor, Trainer]:
    """Train to the last step; return the logits of the images `indices` of `evaluated`, and the finished trainer.

    The logits (N, C) are float32, on the device, the same on every rank. The trainer's `means` and `ledger` are the
    last interval's loss and accuracy, and the cost of the fine-tuning alone.

    Collective. The same call continues to the same bits after a stop at any step, or a kill. A signal raises Preempted
    once all is saved, in the evaluation at its next batch. Raises CheckpointError where the folder holds a fit of other
    settings or the disk refuses, NumericalError for a loss or a weight that is not finite, BadImage.
    """
    try:
        trainer = Trainer(task, task.place, task.folder)
        trainer.run(signals)
    finally:
        task.stream.close()
    if any_rank(signals.requested is not None):
        raise trainer.preempted()
    logits = torch.empty(0, len(task.classes), device=task.place.device)
    if evaluated is not None:
        # Each rank has its own running statistics. Those of rank 0 are saved, so they are evaluated.
        for buffer in task.model.buffers():
            broadcast(buffer)
        options = {"view": view, "before_batch": trainer.stop_if_requested}
        logits = outputs(task.model, evaluated, indices, task.config, task.place, **options)
    trainer.consensus.close()
    return logits, trainer
