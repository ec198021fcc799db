"""The door between pixels and learning: step -> the paired batch of unlabeled views and labeled images on this rank.

Shapes: U unlabeled images of V views each and S labeled ones on this rank, H = W the side of a view in pixels.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastsuncet.config import Arithmetic, Config
from fastsuncet.data.cpu_count import decode_threads
from fastsuncet.distributed.launch import Place
from fastsuncet.models.flops import network_cost
from pipelines.datasets.index import ImageIndex
from pipelines.loader import Loader, open_loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import ClassSampler, UnlabeledSampler
from pipelines.sampling.step_plan import Plan

# Roles name the two streams' draws: changing one never moves the other.
UNLABELED, LABELED = "unlabeled", "labeled"


@dataclass(frozen=True)
class Batch:
    """What one rank learns from at one step. Images are float, in [0, 1] or normalised, channels-last in memory."""

    step: int
    views: tuple[torch.Tensor, ...]  # V of (U, 3, H, W) - row i of each shows the same image
    labeled: torch.Tensor  # (S, 3, H, W) - S = 0 once supervision is switched off
    labels: torch.Tensor  # (S,) int64


class PairedStream:
    """`stream(step)` is this rank's batch: a pure function of (seed, step, rank) and of the files.

    Consecutive steps are prepared ahead; any other step starts there, which is all that resuming is.
    """

    def __init__(
        self, config: Config, index: ImageIndex, labeled: np.ndarray, arithmetic: Arithmetic, place: Place
    ):
        self.index, self.arithmetic, self.place = index, arithmetic, place
        self.views = views(config)
        self.labeled_view = config.data.augmentation
        seed, world_size = config.meta.seed, place.world_size
        self._unlabeled = self._labeled = None
        if self.views:
            self._unlabeled = UnlabeledSampler(len(index), arithmetic.global_unlabeled, world_size, seed)
        if arithmetic.supervised_steps:
            self._labeled = ClassSampler(
                labeled,
                index.labels[labeled],
                arithmetic.classes_per_batch,
                arithmetic.global_images_per_class,
                world_size,
                seed,
                index.classes,
            )
        self._seed = seed
        self._unlabeled_loader = self._open(config, UNLABELED) if self._unlabeled else None
        self._labeled_loader = self._open(config, LABELED) if self._labeled else None
        side = self.labeled_view.size
        self._no_images = torch.empty(0, 3, side, side, device=place.device)
        self._no_labels = torch.empty(0, dtype=torch.int64, device=place.device)

    def plan(self, role: str, rank: int) -> Plan:
        """What `rank` is shown of one stream, UNLABELED or LABELED, step by step; no pixel is read."""
        # One view of a labeled image, of the same strength as those of an unlabeled one (recipe 2.1).
        sampler, shown = (
            (self._labeled, (self.labeled_view,)) if role == LABELED else (self._unlabeled, self.views)
        )
        return Plan(self.index, sampler, shown, seed=self._seed, role=role, rank=rank)

    def _open(self, config: Config, role: str) -> Loader:
        data, plan = config.data, self.plan(role, self.place.rank)
        return open_loader(
            self.index,
            plan,
            **loader_options(config, self.place),
            prefetch=data.prefetch,
            bad_images=data.bad_images,
            color_operator=data.color_operator,
            hw_decoder_share=data.hw_decoder_share,
            decoder_buffers=data.decoder_buffers,
        )

    def __call__(self, step: int, supervised: bool = True) -> Batch:
        """The batch of `step`, without labeled images where it is not `supervised` or the arithmetic says so.

        Raises BadImage, with the file's name, for more bad files than the config allows.
        """
        shown = self._unlabeled_loader(step) if self._unlabeled_loader else ()
        shown = tuple(self._to_device(view) for view in shown)
        labeled, labels = self._no_images, self._no_labels
        if supervised and step < self.arithmetic.supervised_steps:
            (labeled,) = (self._to_device(view) for view in self._labeled_loader(step))
            # The labels last: an image that turns out bad may be replaced by one of another class.
            labels = self._to_device(torch.from_numpy(self._labeled_loader.visit(step).labels))
        elif self._labeled_loader is not None:
            self._labeled_loader.close()  # supervision is off for good: its threads and buffers are free
            self._labeled_loader = None
        return Batch(step, shown, labeled, labels)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.place.device.type == "cuda" and not tensor.is_cuda:
            # From pageable memory a copy may hold the host up until the GPU has come to it, `non_blocking` or not.
            tensor = tensor.pin_memory()
        return tensor.to(self.place.device, non_blocking=True)

    def files(self, step: int, rank: int, role: str) -> list[str]:
        """The images of one stream in one rank's step, by name: for the message when a loss is not a number."""
        plan = self.plan(role, rank)
        return [self.index.name(int(i)) for i in plan(step).indices]

    @property
    def replaced(self) -> set[int]:
        """The bad images of the index that others stand in for, as far as this rank has met them."""
        loaders = (self._unlabeled_loader, self._labeled_loader)
        return {i for loader in loaders if loader is not None for i in loader.replaced}

    @property
    def backend(self) -> str:
        """Which back-end makes the pixels: "dali" or "torchvision"."""
        return (self._unlabeled_loader or self._labeled_loader).backend

    @property
    def own_color(self) -> bool:
        """Whether exact color is made by our own operator for DALI (data.color_operator)."""
        return (self._unlabeled_loader or self._labeled_loader).uses_plugin

    def notes(self) -> list[str]:
        """What a person should know of the labeled images before the run: small classes, left-out ones."""
        return self._labeled.notes() if self._labeled else []

    def close(self) -> None:
        """Frees threads and buffers."""
        for loader in (self._unlabeled_loader, self._labeled_loader):
            if loader is not None:
                loader.close()


def loader_options(config: Config, place: Place) -> dict[str, Any]:
    """How a loader makes pixels here, whatever for."""
    return {
        "device": "gpu" if place.device.type == "cuda" else "cpu",
        "device_id": place.device.index or 0,
        "threads": decode_threads(config.data.decode_threads),
        "backend": config.data.backend,
    }


def views(config: Config) -> tuple[Augmentation, ...]:
    """The views of an unlabeled image: two, or SwAV's two large and several small crops; none where labels are all."""
    if config.criterion.instance == "none":
        return ()
    large = config.data.augmentation
    if config.criterion.instance != "swav":
        return (large, large)
    small = replace(large, size=config.swav.small_size, crop_scale=config.swav.small_scale)
    return (large, large, *(small,) * config.swav.small_crops)


def macs(config: Config, size: int | None = None) -> int:
    """Multiply-adds of a forward pass through encoder and head of one view as large as a labeled image, or `size`."""
    m = config.model
    size = size or config.data.augmentation.size
    return network_cost(m.name, m.stem, size, m.hidden, m.output, m.head_batchnorm).macs


def update_macs(config: Config, arithmetic: Arithmetic, supervised: bool) -> int:
    """Multiply-adds of the forward passes of one update, over all processes, with or without labeled images."""
    a, large = arithmetic, macs(config)
    unlabeled = a.large_views * large
    if a.small_views:
        unlabeled += a.small_views * macs(config, config.swav.small_size)
    return a.global_unlabeled * unlabeled + (a.global_labeled * large if supervised else 0)


def run_macs(config: Config, arithmetic: Arithmetic) -> int:
    """Multiply-adds of all forward passes of a run, over all processes."""
    on, off = arithmetic.supervised_steps, arithmetic.steps - arithmetic.supervised_steps
    return on * update_macs(config, arithmetic, True) + off * update_macs(config, arithmetic, False)
