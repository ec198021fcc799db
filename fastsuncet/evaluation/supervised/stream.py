"""What a supervised fit is shown: random crops and flips of its training images, and what they are to be told as.

Shapes: B images an update over W ranks in A passes each, m = B / (W A) images a pass, C classes.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import loader_options
from fastsuncet.distributed.launch import Place
from fastsuncet.metrics.data_timer import DataTimer
from pipelines.datasets.index import ImageIndex
from pipelines.loader import open_loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import SubsetSampler
from pipelines.sampling.step_plan import Plan, Visit

ROLE = "fit"  # of the draws: a stream apart from pre-training's


class PassPlan:
    """A rank's visits, A for each step: visit `step * A + part` is the part's m rows of the step's batch.

    Part a of rank r is block a W + r of the batch, so that A passes of one rank and one pass on each of A ranks show
    the same blocks of images: the same gradients, BatchNorm's included.
    """

    def __init__(
        self,
        index: ImageIndex,
        sampler: SubsetSampler,  # of W A ranks
        view: Augmentation,
        *,
        seed: int,
        passes: int,  # A
        place: Place,
    ):
        ranks = [part * place.world_size + place.rank for part in range(passes)]
        self._parts = [Plan(index, sampler, (view,), seed=seed, role=ROLE, rank=rank) for rank in ranks]
        self.augmentations, self.batch = (view,), sampler.local_batch
        self.stand_in = self._parts[0].stand_in

    def __call__(self, visit: int, replaced: Mapping[int, int] | None = None) -> Visit:
        step, part = divmod(visit, len(self._parts))
        return self._parts[part](step, replaced)


class FitStream:
    """`stream(step, part)` is what one pass learns from: a pure function of (seed, step, part, rank) and the files."""

    def __init__(
        self,
        index: ImageIndex,
        indices: np.ndarray,  # int64 - the images to train on
        view: Augmentation,
        config: Config,  # back-end, threads, bad images
        place: Place,
        *,
        batch: int,  # B
        passes: int,  # A
        seed: int,
        several: bool,  # whether an image shows several classes: targets are then the index's presence
        wait: DataTimer,  # told when pixels are asked for and when they are there
    ):
        self.wait = wait
        sampler = SubsetSampler(indices, batch, place.world_size * passes, seed)
        self.plan = PassPlan(index, sampler, view, seed=seed, passes=passes, place=place)
        self.steps_per_epoch, self.passes = sampler.steps_per_epoch, passes
        self._index, self._several, self._device = index, several, place.device
        data = config.data
        self._loader = open_loader(
            index,
            self.plan,
            prefetch=data.prefetch,
            bad_images=data.bad_images,
            **loader_options(config, place),
        )

    def __call__(self, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Images (m, 3, S, S) and targets: labels int64 (m,), or presence int8 (m, C)."""
        self.wait.begin()
        number = step * self.passes + part
        (images,) = self._loader(number)
        visit = self._loader.visit(number)  # asked last: a bad image may be replaced by one of another class
        targets = self._index.presence[visit.indices] if self._several else visit.labels
        images, targets = (x.to(self._device, non_blocking=True) for x in (images, torch.from_numpy(targets)))
        self.wait.end()
        return images, targets

    def files(self, step: int) -> list[str]:
        """The images of this rank's share of a step, by name."""
        visits = [self.plan(step * self.passes + part) for part in range(self.passes)]
        return [self._index.name(int(i)) for visit in visits for i in visit.indices]

    @property
    def replaced(self) -> set[int]:
        """The bad images that others stand in for, as far as this rank has met them."""
        return set(self._loader.replaced)

    @property
    def backend(self) -> str:
        """Which back-end makes the pixels: "dali" or "torchvision"."""
        return self._loader.backend

    def close(self) -> None:
        """Frees threads and buffers."""
        self._loader.close()
