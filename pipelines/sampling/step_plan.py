"""What one step of one stream is made of: which images, with which labels, cropped and coloured how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.sampling.augmentation import (
    Augmentation,
    Center,
    CenterParams,
    ViewParams,
    center_view,
    draw_view,
    uniform,
)

SAME_CLASS_ATTEMPTS = 16  # stand-ins tried within a bad image's class before any image of the stream will do


@dataclass(frozen=True, eq=False)
class Visit:
    """One rank's share of one step, before any pixel is read."""

    step: int
    indices: np.ndarray  # (B,) int64 into the index
    labels: np.ndarray  # (B,) int64, -1 = none known
    views: tuple[ViewParams, ...] | tuple[CenterParams]  # one per view, each over the B rows


class Plan:
    """A training stream: `plan(step)` is a pure function of (seed, role, step, rank) and of nothing else.

    `sampler.rows(step, rank)` says which images; `augmentations` how strongly each view is changed. The
    sampler's `indices`, where it has them (a class-subsampling one), are the images this stream may ever
    show.
    """

    def __init__(
        self,
        index: Any,  # pipelines.datasets.index.ImageIndex
        sampler: Any,  # pipelines.sampling.samplers.UnlabeledSampler | ClassSampler
        augmentations: Sequence[Augmentation],
        *,
        seed: int,
        role: int | str,
        rank: int = 0,
    ):
        if not 0 <= rank < sampler.world_size:
            raise ValueError(f"rank {rank} is not one of the sampler's {sampler.world_size} ranks")
        self.index, self.sampler, self.augmentations = index, sampler, tuple(augmentations)
        self.seed, self.role, self.rank = seed, role, rank
        self.batch = sampler.local_batch

    def __call__(self, step: int, replaced: Mapping[int, int] | None = None) -> Visit:
        """This rank's visit at `step`; `replaced` maps an undecodable image to the one standing in for it.

        A stand-in takes the row's draws but its own size and label: the crop box is drawn for the image that
        is read.
        """
        indices = np.asarray(self.sampler.rows(step, self.rank), np.int64)
        if replaced:
            indices = np.array([replaced.get(int(i), i) for i in indices], np.int64)
        first_row = self.rank * self.batch  # not len(indices): a sampler's last batch may be ragged
        views = tuple(
            draw_view(
                augmentation,
                self.index.sizes[indices],
                seed=self.seed,
                step=step,
                role=f"{self.role}/view {view}",
                first_row=first_row,
            )
            for view, augmentation in enumerate(self.augmentations)
        )
        return Visit(step, indices, self.index.labels[indices], views)

    def stand_in(self, bad: int, attempt: int) -> int:
        """The image to show in place of `bad`: a pure function of (seed, role, bad, attempt).

        So all ranks agree without talking. A class-subsampling stream takes it from the bad image's own class
        for the first attempts, so that the batch keeps its balance. A stream without labels takes any image:
        labels must not reach it, not even this way.
        """
        pool = getattr(self.sampler, "indices", None)
        if pool is None:
            pool = np.arange(len(self.index.labels))
        elif attempt < SAME_CLASS_ATTEMPTS:
            same_class = pool[self.index.labels[pool] == self.index.labels[bad]]
            pool = same_class if len(same_class) > 1 else pool
        (draw,) = uniform(self.seed, f"{self.role}/stand-in", (0, attempt, bad, 0), 1)
        return int(pool[int(draw * len(pool))])


class CenterPlan:
    """An evaluation stream: every image of `indices` once, in order, `batch` a step, the last one ragged."""

    def __init__(self, index: Any, indices: np.ndarray, batch: int, center: Center):
        self.index, self.indices, self.batch = index, np.asarray(indices, np.int64), batch
        self.augmentations = (center,)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __call__(self, step: int, replaced: Mapping[int, int] | None = None) -> Visit:
        """The visit of `step`; an evaluation shows no stand-ins, so `replaced` must be empty."""
        if replaced:
            raise ValueError("an evaluation counts every image once: none can stand in for another")
        if step >= len(self):
            raise StopIteration  # what a reader ahead takes for the end
        indices = self.indices[step * self.batch : (step + 1) * self.batch]
        (center,) = self.augmentations
        view = center_view(center, self.index.sizes[indices])
        return Visit(step, indices, self.index.labels[indices], (view,))


class PassPlan:
    """One pass over images with random views: every image of `indices` once, in order, `batch` a step.

    View v of the image in place p is a pure function of (seed, role, v, p), where the places of this rank's
    `indices` begin at `first`: ranks that share a list see the views that one would.
    """

    def __init__(
        self,
        index: Any,
        indices: np.ndarray,
        batch: int,
        augmentations: Sequence[Augmentation],
        *,
        seed: int,
        role: str,
        first: int = 0,
    ):
        self.index, self.indices, self.batch = index, np.asarray(indices, np.int64), batch
        self.augmentations = tuple(augmentations)
        self.seed, self.role, self.first = seed, role, first

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __call__(self, step: int, replaced: Mapping[int, int] | None = None) -> Visit:
        """The visit of `step`; an evaluation shows no stand-ins, so `replaced` must be empty."""
        if replaced:
            raise ValueError("an evaluation shows every image it names: none can stand in for another")
        if step >= len(self):
            raise StopIteration  # what a reader ahead takes for the end
        indices = self.indices[step * self.batch : (step + 1) * self.batch]
        views = tuple(
            draw_view(
                augmentation,
                self.index.sizes[indices],
                seed=self.seed,
                step=0,  # the place is the only counter, however large the batches
                role=f"{self.role}/view {view}",
                first_row=self.first + step * self.batch,
            )
            for view, augmentation in enumerate(self.augmentations)
        )
        return Visit(step, indices, self.index.labels[indices], views)
