"""The images that fine-tuning learns from: random crops and flips, with their labels.

Shapes: B images an update over W ranks in A passes each, m = B / (W A) images a pass, C classes.
"""

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
from pipelines.sampling.step_plan import Plan

ROLE = "fit"  # of the random draws: independent of those of pre-training


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
