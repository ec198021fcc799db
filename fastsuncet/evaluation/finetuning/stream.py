"""The images that fine-tuning learns from: random crops and flips, with their labels.

Shapes: B images an update over W ranks in A passes each, m = B / (W A) images a pass, C classes.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import loader_options
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.finetuning.record import sizes
from pipelines.backend import to_device
from pipelines.datasets.index import ImageIndex
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import SubsetSampler
from pipelines.sampling.step_plan import BatchDraws, Plan

ROLE = "fit"  # of the random draws: independent of those of pre-training


class AccumulationPlan(Plan):
    """One rank's draws, A for each step: number `step * A + part` is the rows of that pass in the step's batch.

    Pass a of rank r is block a W + r of the batch. So A passes of one rank and one pass on each of A ranks see the same
    blocks of images, with the same gradients, BatchNorm's included.
    """

    def __init__(
        self,
        index: ImageIndex,
        sampler: SubsetSampler,  # of W A ranks
        view: Augmentation,
        *,
        seed: int,
        passes: int,  # A
        rank: int,
    ):
        super().__init__(index, sampler, (view,), seed=seed, role=ROLE, rank=rank)
        blocks = range(rank, sampler.world_size, sampler.world_size // passes)
        self._parts = [Plan(index, sampler, (view,), seed=seed, role=ROLE, rank=block) for block in blocks]

    def __call__(self, number: int, replaced: Mapping[int, int] | None = None) -> BatchDraws:
        step, part = divmod(number, len(self._parts))
        return self._parts[part](step, replaced)


class FineTuningStream:
    """`stream(step, part)` is what one pass learns from: a pure function of (seed, step, part, rank) and the files."""

    def __init__(self, index: ImageIndex, indices: np.ndarray, config: Config, place: Place):
        """Show the images `indices`, int64, as the sections finetune and data of `config` say."""
        f, a, seed = config.finetune, config.data.augmentation, config.meta.seed
        shown = {"size": a.size, "crop_scale": f.crop_scale, "crop_ratio": a.crop_ratio, "flip": a.flip}
        view = Augmentation(**shown, blur=0.0, mean=a.mean, std=a.std).uncolored
        self.passes, self._index, self._place = f.accumulate, index, place
        sampler = SubsetSampler(indices, sizes(config)[0], place.world_size * self.passes, seed)
        self.steps_per_epoch = sampler.steps_per_epoch
        draws = {"seed": seed, "passes": self.passes}
        ranks = range(place.world_size)
        self._plans = [AccumulationPlan(index, sampler, view, rank=rank, **draws) for rank in ranks]
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
