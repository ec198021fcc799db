"""The door between pixels and learning: step -> the paired batch of unlabeled views and labeled images on this rank.

Shapes: U unlabeled and S labeled images on this rank, H = W the side of a view in pixels.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from fastsuncet.compute import analytic_macs
from fastsuncet.config import Arithmetic, Config
from fastsuncet.launch import Place
from pipelines.index import ImageIndex
from pipelines.loader import Loader, open_loader
from pipelines.params import Augmentation
from pipelines.plan import Plan
from pipelines.sampling import ClassSampler, UnlabeledSampler

# Roles name the two streams' draws: changing one never moves the other.
UNLABELED, LABELED = "unlabeled", "labeled"


@dataclass(frozen=True)
class Batch:
    """What one rank learns from at one step. Images are float, in [0, 1] or normalised, channels-last in memory."""

    step: int
    view_1: torch.Tensor  # (U, 3, H, W)
    view_2: torch.Tensor  # (U, 3, H, W) - row i shows the same image as row i of view_1
    labeled: torch.Tensor  # (S, 3, H, W) - S = 0 once supervision is switched off
    labels: torch.Tensor  # (S,) int64
    wait: float  # seconds the host waited for the pixels


class PairedStream:
    """`stream(step)` is this rank's batch: a pure function of (seed, step, rank) and of the files.

    Consecutive steps are prepared ahead; any other step starts there, which is all that resuming is.
    """

    def __init__(
        self, config: Config, index: ImageIndex, labeled: np.ndarray, arithmetic: Arithmetic, place: Place
    ):
        self.index, self.arithmetic, self.place = index, arithmetic, place
        self.views = augmentation(config)
        seed, world_size = config.meta.seed, place.world_size
        self._unlabeled = UnlabeledSampler(len(index), arithmetic.global_unlabeled, world_size, seed)
        self._labeled = None
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
        self._unlabeled_loader = self._open(config, UNLABELED)
        self._labeled_loader = self._open(config, LABELED) if self._labeled else None
        side = self.views.size
        self._no_images = torch.empty(0, 3, side, side, device=place.device)
        self._no_labels = torch.empty(0, dtype=torch.int64, device=place.device)

    def plan(self, role: str, rank: int) -> Plan:
        """What `rank` is shown of one stream, UNLABELED or LABELED, step by step; no pixel is read."""
        # One view of a labeled image, two of an unlabeled one, all of the same strength (recipe 2.1).
        sampler, views = (self._labeled, 1) if role == LABELED else (self._unlabeled, 2)
        return Plan(self.index, sampler, (self.views,) * views, seed=self._seed, role=role, rank=rank)

    def _open(self, config: Config, role: str) -> Loader:
        data, plan = config.data, self.plan(role, self.place.rank)
        return open_loader(
            self.index,
            plan,
            plan.augmentations,
            device="gpu" if self.place.device.type == "cuda" else "cpu",
            device_id=self.place.device.index or 0,
            threads=data.decode_threads,
            prefetch=data.prefetch,
            backend=data.backend,
            bad_images=data.bad_images,
        )

    def __call__(self, step: int) -> Batch:
        """The batch of `step`. Raises BadImage, with the file's name, for more bad files than the config allows."""
        began = time.perf_counter()
        view_1, view_2 = (self._to_device(view) for view in self._unlabeled_loader(step))
        labeled, labels = self._no_images, self._no_labels
        if step < self.arithmetic.supervised_steps:
            (labeled,) = (self._to_device(view) for view in self._labeled_loader(step))
            # The labels last: an image that turns out bad may be replaced by one of another class.
            labels = self._to_device(torch.from_numpy(self._labeled_loader.visit(step).labels))
        elif self._labeled_loader is not None:
            self._labeled_loader.close()  # supervision is off for good: its threads and buffers are free
            self._labeled_loader = None
        return Batch(step, view_1, view_2, labeled, labels, time.perf_counter() - began)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.place.device, non_blocking=True)

    def files(self, step: int, rank: int, term: str) -> list[str]:
        """The images behind one loss term of one rank's step, by name: for the message when it is not a number."""
        plan = self.plan(LABELED if term == "suncet" else UNLABELED, rank)
        return [self.index.name(int(i)) for i in plan(step).indices]

    @property
    def replaced(self) -> set[int]:
        """The bad images of the index that others stand in for, as far as this rank has met them."""
        loaders = (self._unlabeled_loader, self._labeled_loader)
        return {i for loader in loaders if loader is not None for i in loader.replaced}

    @property
    def backend(self) -> str:
        """Which back-end makes the pixels: "dali" or "torchvision"."""
        return self._unlabeled_loader.backend

    def notes(self) -> list[str]:
        """What a person should know of the labeled images before the run: small classes, left-out ones."""
        return self._labeled.notes() if self._labeled else []

    def close(self) -> None:
        """Frees threads and buffers."""
        for loader in (self._unlabeled_loader, self._labeled_loader):
            if loader is not None:
                loader.close()


def augmentation(config: Config) -> Augmentation:
    """A training view as the pixels know it: the paper's strength s becomes four factors (0.8s, 0.8s, 0.8s, 0.2s)."""
    a = config.data.augmentation
    return Augmentation(
        size=a.size,
        crop_scale=a.crop_scale,
        crop_ratio=a.crop_ratio,
        flip=a.flip,
        jitter=a.jitter,
        brightness=0.8 * a.strength,
        contrast=0.8 * a.strength,
        saturation=0.8 * a.strength,
        hue=0.2 * a.strength,
        grey=a.grey,
        blur=a.blur,
        blur_sigma=a.blur_sigma,
        blur_window=None if a.blur_window == "auto" else a.blur_window,
        color=a.color,
        mean=a.mean,
        std=a.std,
    )


def macs(config: Config) -> int:
    """Multiply-adds of one view's forward pass through the encoder and the head."""
    m = config.model
    return analytic_macs(m.name, m.stem, config.data.augmentation.size, m.hidden, m.output)
