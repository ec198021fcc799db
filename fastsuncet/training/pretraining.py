"""Pre-training, as the training loop runs it: the paired stream, the paper's step, its schedule, online k-NN.

Supervision ends at a step known before the run, or once its loss has plateaued (paper, appendix E).
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fastsuncet.config import Arithmetic, Config
from fastsuncet.config.reader import as_yaml
from fastsuncet.data.dataset import Images
from fastsuncet.data.paired_stream import LABELED, UNLABELED, Batch, PairedStream
from fastsuncet.distributed.collectives import all_gather_rows, broadcast
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.interval import DataTimer
from fastsuncet.models.flops import update_macs
from fastsuncet.optim import DeviceLR, warmup_cosine
from fastsuncet.training import methods
from fastsuncet.training.step import build, train_step
from fastsuncet.training.task import COST, SPEED, TrainingTask

# Sizes that a run keeps on any number of processes, and their names in messages.
SIZES = {
    "global_unlabeled": "unlabeled images an update",
    "global_images_per_class": "labeled images of each class an update",
    "steps_per_epoch": "updates an epoch",
    "steps": "updates of the run",
    "supervised_steps": "updates with labels",
    "warmup_steps": "updates of the warm-up",
}
# Why a setting cannot change, in the message that refuses it.
NOTES = {
    "meta.precision": " (auto chooses by the hardware; write the checkpoint's to continue on other hardware)",
}


def has_plateaued(means: list[float], epochs: int, gain: float) -> bool:
    """Return whether to switch supervision off, from the mean supervised loss of each epoch so far.

    True once the median loss of the last P epochs has failed, for P epochs, to come a fraction g below its lowest value
    before them; or once that median is below a fraction g of the first epoch's loss. Never before 2 P epochs. `epochs`
    is P, at least 1; `gain` is g, in (0, 1].

    Medians, because one epoch of few labels is noisy (5 % on the recorded curves of tests/training). The second half is
    for cross-entropy, which has no floor and keeps falling by a fraction on memorized images.
    """
    if len(means) < 2 * epochs:
        return False
    smooth = [median(means[end - epochs : end]) for end in range(epochs, len(means) + 1)]
    stuck = min(smooth[-epochs:]) >= (1 - gain) * min(smooth[:-epochs])
    return stuck or smooth[-1] < gain * means[0]


class Supervision:
    """`on(step)`: whether the labeled images are learned from at `step`, the same on all ranks.

    With `supervised_epochs: plateau` the answer depends on the losses so far, so it is part of a checkpoint. That costs
    one sync with the device per epoch, while supervision is on.
    """

    def __init__(self, config: Config, arithmetic: Arithmetic, rank: int, device: torch.device):
        self.criterion, self.arithmetic, self.rank = config.criterion, arithmetic, rank
        self.waits = config.criterion.supervised_epochs == "plateau"
        self.means: list[float] = []  # of the epochs so far, oldest first
        self.ended: int | None = None  # the first step without supervision, once the rule has decided
        self.sum = torch.zeros((), dtype=torch.float64, device=device)  # of this rank's losses in this epoch

    def on(self, step: int) -> bool:
        """Whether `step` has labeled images."""
        return step < (self.arithmetic.supervised_steps if self.ended is None else self.ended)

    def add(self, loss: Tensor, step: int) -> bool:
        """Take the supervised loss of `step`, on the device. True: it was the last step with supervision."""
        if not self.waits or self.ended is not None:
            return False
        self.sum += loss
        if (step + 1) % self.arithmetic.steps_per_epoch:
            return False
        mean = all_gather_rows(self.sum[None]).mean() / self.arithmetic.steps_per_epoch
        self.sum.zero_()
        self.means.append(mean.item())
        if has_plateaued(self.means, self.criterion.plateau_epochs, self.criterion.plateau_gain):
            self.ended = step + 1
        return self.ended is not None

    def state(self) -> dict:
        """Return plain values for a checkpoint. Collective: the sums of all ranks are gathered."""
        if not self.waits:
            return {}
        sums = all_gather_rows(self.sum[None]).tolist()
        return {"means": self.means, "sums": sums, "ended": self.ended}

    def restore(self, state: dict) -> None:
        """Continue from `state`. On another number of ranks each takes the mean of the interrupted epoch's sums."""
        if not self.waits:
            return
        self.means = list(state["means"])
        sums, world_size = state["sums"], self.arithmetic.world_size
        self.sum.fill_(sums[self.rank] if len(sums) == world_size else sum(sums) / len(sums))
        self.ended = state["ended"]


class Pretraining(TrainingTask[Batch]):
    """SimCLR + SuNCEt, or the config's other method, on `images`. `training.step.train_step` is the update."""

    stream: PairedStream
    optimizer: DeviceLR
    roles = (UNLABELED, LABELED)
    value_count = 4
    pieces_key = "criterion.micro_batch"
    world_size_note = (
        "the same images in the same global batches, so results are equal up to rounding, not to the bit"
    )

    def __init__(
        self,
        config: Config,
        place: Place,
        arithmetic: Arithmetic,
        stream: PairedStream,
        images: Images,
        # `online_knn`, None where the config asks for none: this folder imports nothing of evaluation
        evaluate_online: Callable[..., dict[str, float]] | None,
        paths: Mapping[str, str | None],  # fast path -> why it is off, None if on (tuning.fast_paths)
    ):
        self.config, self.place, self.arithmetic = config, place, arithmetic
        self.stream, self.images, self.evaluate_online, self.paths = stream, images, evaluate_online, paths
        o, a = config.optimization, arithmetic
        self.steps, self.steps_per_epoch = a.steps, a.steps_per_epoch
        size = "unsupervised_batch_size" if stream.views else "supervised_imgs_per_class"
        self.batch_key = f"criterion.{size}"
        self.lr = partial(
            warmup_cosine,
            steps=a.steps,
            warmup_steps=a.warmup_steps,
            start_lr=o.start_lr,
            lr=o.lr,
            final_lr=o.final_lr,
            legacy=o.legacy_schedule,
        )
        self.log_every = config.logging.log_every
        saves = (config.checkpoint.every, (config.checkpoint.every_epochs or 0) * a.steps_per_epoch)
        self.save_every = tuple(every for every in saves if every)
        self.keep = self.keep_at_end = config.checkpoint.keep
        self.evaluate_every = (config.evaluation.knn_every_epochs or 0) * a.steps_per_epoch
        self.model, self.network, self.optimizer, self.method = build(
            config, place, len(images.train.classes), images.split.per_class.tolist(), arithmetic
        )
        self.scaler = self.method.scaler
        self.graphed = None
        if config.meta.cuda_graph is True:
            from fastsuncet.training.cuda_graph import GraphedStep

            self.graphed = GraphedStep(self.network, self.optimizer, self.method)
        self.supervision = Supervision(config, arithmetic, place.rank, place.device)
        self.terms = methods.terms(config)
        losses = [term for term in self.terms if term != "none"]
        norms = (f"{term}_gradient" for term in losses)
        self.columns = ("epoch", "loss", *losses, *norms, *SPEED, *COST, "joules")
        pieces = len(arithmetic.pieces(arithmetic.supervised_steps > 0)) > 1
        if pieces or not config.model.sync_batchnorm:
            self.world_size_note = (
                "the same images in the same global batches, but BatchNorm sees other parts of them "
                f"({'criterion.micro_batch' if pieces else 'model.sync_batchnorm is false'}), so results are those "
                "of neither number alone"
            )
        self.cost_of = {
            on: (arithmetic.update_views(on), update_macs(config, arithmetic, on)) for on in (True, False)
        }
        self.fingerprint = images.fingerprint()
        self.contents = {"contents": images.train.contents(), "changed": len(images.train.changed)}
        self.sizes = {name: getattr(arithmetic, name) for name in SIZES}
        self.init: dict[str, str] | None = None  # path, sha256 and note of model.init

    def batch(self, step: int, timer: DataTimer) -> Batch:
        timer.begin()
        batch = self.stream(step, self.supervision.on(step))
        timer.end()
        return batch

    def train_step(self, batch: Batch, lr: float) -> Tensor:
        if self.graphed is not None:
            return self.graphed(batch, lr)
        return train_step(self.network, self.optimizer, batch, lr, self.method)

    def cost(self, step: int) -> tuple[int, int]:
        return self.cost_of[self.supervision.on(step)]

    def after_step(self, step: int, values: Tensor) -> str | None:
        if self.supervision.add(values[1], step):
            return f"{self.terms[1]} has plateaued: off from step {step + 1:,} on"
        return None

    def evaluate(self, bad: set[int], before_batch: Callable[[], None]) -> dict[str, float]:
        if not self.config.model.sync_batchnorm:
            # Each rank has its own statistics. Those of rank 0 are saved, so they are evaluated.
            for buffer in self.model.buffers():
                broadcast(buffer)
        assert self.evaluate_online is not None, "evaluate_every is above 0"
        what = (self.model, self.images, self.config, self.place)
        return self.evaluate_online(*what, bad=bad, before_batch=before_batch)

    def meta(self, epoch: float) -> dict[str, Any]:
        return {
            "config": self.config.written.canonical(),
            "epoch": epoch,
            "classes": list(self.images.train.classes),
            "images": self.fingerprint,
            "sizes": self.sizes,
            "init": self.init,
            **self.contents,
            "paths": {path: reason is None for path, reason in self.paths.items()},
        }

    def check_resume_compatible(self, meta: dict[str, Any]) -> None:
        changed = self.config.written.changed_keys(meta["config"])
        if changed:
            lines = [
                f"{key}: {as_yaml(old)} in the checkpoint, {as_yaml(new)} now{NOTES.get(key, '')}"
                for key, old, new in changed
            ]
            raise CheckpointError(
                "\n  ".join(["the config differs from the one this run was started with:", *lines])
                + "\nSet these back to continue the run, or give the new run another logging.write_tag."
            )
        from fastsuncet.training import initial_weights  # a new run without model.init does not need it

        initial_weights.check(self.config, meta)
        if meta["images"] != self.fingerprint:
            raise CheckpointError(
                "the training images or their labels differ from those this run was started with (files added, "
                "removed, resized or labeled otherwise). Bring them back, or give the new run another "
                "logging.write_tag."
            )
        train, now = self.images.train, self.contents
        changed = meta["contents"] != now["contents"] or meta["changed"] < now["changed"]
        if changed and not self.config.data.changed_images:
            which = f"{len(train.changed)} of {len(train)} training images ({train.some(train.changed)})"
            raise CheckpointError(
                f"{which if train.changed else 'training images'} were written again since this run was saved. "
                "Bring the files back, set data.changed_images=true to continue on the new ones, or give the new run "
                "another logging.write_tag."
            )
        before = meta["sizes"]
        lines = [
            f"{text}: {before[name]:,} in the checkpoint, {self.sizes[name]:,} now"
            for name, text in SIZES.items()
            if before[name] != self.sizes[name]
        ]
        if lines:
            count = meta["world_size"]
            number = f"with another number of processes ({self.place.world_size} instead of {count})"
            raise CheckpointError(
                "\n  ".join([f"{number} this is another run:", *lines])
                + f"\nContinue with {count}, or give the new run another logging.write_tag. Batch sizes without "
                "per_rank and without criterion.labeled_share are the same on any number."
            )

    def close(self) -> None:
        if self.graphed is not None:
            self.graphed.close()

    def begin(self) -> None:
        if self.config.model.init is not None:
            from fastsuncet.training import initial_weights

            self.init = initial_weights.load(self.config, self.model, self.place)

    def state(self) -> dict[str, Any]:
        return {"supervision": self.supervision.state(), "init": self.init}

    def restore(self, values: dict[str, Any]) -> None:
        self.supervision.restore(values["supervision"])
        self.init = values["init"]

    @property
    def chosen(self) -> dict[str, Any]:
        used = [path for path, reason in self.paths.items() if reason is None]
        return {"precision": self.config.meta.precision, "paths": used}
