"""The training images of one rank: step -> a batch of unlabeled views and labeled images.

Shapes: U unlabeled images of V views each and S labeled ones on this rank, H = W the side of a view in pixels.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from fastsuncet.config import Arithmetic, Config
from fastsuncet.config.schema import WITH_SMALL_CROPS
from fastsuncet.distributed.place import Place
from pipelines.backend import LoaderOptions, decode_threads, to_device
from pipelines.datasets.index import ImageIndex
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import ClassSampler, UnlabeledSampler
from pipelines.sampling.step_plan import Plan

# The two streams have different names in the random draws: a change of one never moves the other.
UNLABELED, LABELED = "unlabeled", "labeled"


@dataclass(frozen=True)
class Batch:
    """What one rank learns from at one step. Images are float, in [0, 1] or normalized, channels-last in memory."""

    step: int
    views: tuple[torch.Tensor, ...]  # V of (U, 3, H, W) - row i of each shows the same image
    labeled: torch.Tensor  # (S, 3, H, W), view by view - S = 0 once supervision is switched off
    labels: torch.Tensor  # (S,) int64


class PairedStream:
    """`stream(step)` is this rank's batch: a pure function of (seed, step, rank) and of the files.

    Consecutive steps are prepared ahead. Any other step starts there, and that is all that resuming needs.
    """

    def __init__(
        self, config: Config, index: ImageIndex, labeled: np.ndarray, arithmetic: Arithmetic, place: Place
    ):
        """`labeled`: numbers of the images that data.split chose (`open_images` of dataset.py), int64."""
        self.index, self.arithmetic, self.place = index, arithmetic, place
        self.views = views(config)
        self.labeled_view = config.data.augmentation
        self._seed, ranks, a = config.meta.seed, place.world_size, arithmetic
        self._samplers: dict[str, UnlabeledSampler | ClassSampler] = {}
        if self.views:
            self._samplers[UNLABELED] = UnlabeledSampler(len(index), a.global_unlabeled, ranks, self._seed)
        if a.supervised_steps:
            labels, size = index.labels[labeled], (a.classes_per_batch, a.global_images_per_class)
            sampler = ClassSampler(labeled, labels, *size, ranks, self._seed, index.classes)
            self._samplers[LABELED] = sampler
        self._loaders = {role: self._open(config, role) for role in self._samplers}
        self._threads_alone = loader_options(config, place).threads
        side = self.labeled_view.size
        self._no_images = torch.empty(0, 3, side, side, device=place.device)
        self._no_labels = torch.empty(0, dtype=torch.int64, device=place.device)
        # By the stream of labeled images, once supervision is off for good.
        self._replaced_before: set[int] = set()

    def plan(self, role: str, rank: int) -> Plan:
        """Return the plan of one stream, UNLABELED or LABELED, on `rank`; no pixel is read."""
        # A labeled image's views are of the same strength as those of an unlabeled one (recipe 2.1).
        shown = self.views if role == UNLABELED else (self.labeled_view,) * self.arithmetic.labeled_views
        return Plan(self.index, self._samplers[role], shown, seed=self._seed, role=role, rank=rank)

    def _open(self, config: Config, role: str) -> Loader:
        data = config.data
        options = replace(
            loader_options(config, self.place, streams=len(self._samplers)),
            view_operator=data.view_operator,
            hw_decoder_share=data.hw_decoder_share,
        )
        return Loader(self.plan(role, self.place.rank), options, bad_images=data.bad_images)

    def __call__(self, step: int, supervised: bool = True) -> Batch:
        """Return the batch of `step`, without labeled images unless it is `supervised` and the arithmetic says so.

        Raises BadImage, with the file's name, for more bad files than the config allows.
        """
        supervised = supervised and step < self.arithmetic.supervised_steps
        if not supervised and LABELED in self._loaders:
            # Supervision is off for good: free its buffers, and give its threads to the other stream.
            ended = self._loaders.pop(LABELED)
            ended.close()
            self._replaced_before |= ended.replaced.keys()
            for loader in self._loaders.values():
                loader.use_threads(self._threads_alone)
        shown = self._loaders[UNLABELED](step) if self.views else ()
        shown = tuple(to_device(view, self.place.device) for view in shown)
        labeled, labels = self._no_images, self._no_labels
        if supervised:
            loader = self._loaders[LABELED]
            seen = [to_device(view, self.place.device) for view in loader(step)]
            labeled = torch.cat(seen) if len(seen) > 1 else seen[0]
            # The labels come last: a bad image can be replaced by one of another class.
            labels = torch.from_numpy(loader.draws(step).labels).repeat(len(seen))
            labels = to_device(labels, self.place.device)
        return Batch(step, shown, labeled, labels)

    def files(self, step: int, rank: int, role: str) -> list[str]:
        """Return the names of one stream's images in one rank's step, for the message on a non-finite loss."""
        return [self.index.name(int(i)) for i in self.plan(role, rank)(step).indices]

    @property
    def replaced(self) -> set[int]:
        """The bad images of the index that others stand in for, as far as this rank has met them."""
        return self._replaced_before.union(*(loader.replaced for loader in self._loaders.values()))

    @property
    def options(self) -> LoaderOptions:
        """What makes the pixels, without "auto"."""
        return next(iter(self._loaders.values())).options

    def notes(self) -> list[str]:
        """Return lines about the labeled images, for the start of a run: small classes, left-out ones."""
        sampler = self._samplers.get(LABELED)
        notes = sampler.notes() if isinstance(sampler, ClassSampler) else []
        return [f"{'note':<9}{note}" for note in notes]

    def close(self) -> None:
        """Free threads and buffers."""
        for loader in self._loaders.values():
            loader.close()


def loader_options(config: Config, place: Place, streams: int = 1) -> LoaderOptions:
    """Return the options of an evaluation's or a fine-tuning's loader, of which `streams` run at the same time."""
    # On a GPU a stream has two pools of threads, DALI's and its decoder's. On a CPU it has one pool, and the small
    # stream would leave its half of the cores idle.
    gpu = place.device.type == "cuda"
    return LoaderOptions(
        backend=config.data.backend,
        device="gpu" if gpu else "cpu",
        device_id=place.device.index or 0,
        threads=decode_threads(config.data.decode_threads, streams=streams if gpu else 1),
        prefetch=config.data.prefetch,
    )


def views(config: Config) -> tuple[Augmentation, ...]:
    """Return the views of an unlabeled image: two, with SwAV and PAWS also small crops; none without a loss."""
    if config.criterion.instance == "none":
        return ()
    large = config.data.augmentation
    if config.criterion.instance not in WITH_SMALL_CROPS:
        return (large, large)
    small = replace(large, size=config.swav.small_size, crop_scale=config.swav.small_scale)
    return (large, large, *(small,) * config.swav.small_crops)
