"""What one step of one stream is made of: which images, with which labels, cropped and colored how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import (
    Augmentation,
    Center,
    CenterParams,
    ViewParams,
    center_view,
    draw_view,
    uniform,
)
from pipelines.sampling.samplers import ClassSampler, UnlabeledSampler

SAME_CLASS_ATTEMPTS = 16  # stand-ins tried within a bad image's class before any image of the stream is taken


@dataclass(frozen=True, eq=False)
class BatchDraws:
    """One rank's share of one step, before any pixel is read."""

    step: int
    indices: np.ndarray  # (B,) int64 into the index
    labels: np.ndarray  # (B,) int64, -1 = not labeled
    views: tuple[ViewParams | CenterParams, ...]  # one for each view, over the B rows


class Plan:
    """A training stream: `plan(step)` is a pure function of (seed, role, step, rank).

    `sampler` says which images, `augmentations` how strongly each view is changed.

    A step in A `passes` has the numbers step * A, step * A + 1, ..., and a sampler of W A ranks for W ranks: pass a of
    rank r is its block a W + r. So A passes of one rank and one pass on each of A ranks see the same blocks of images,
    with the same gradients, BatchNorm's included.
    """

    def __init__(
        self,
        index: ImageIndex,
        sampler: UnlabeledSampler | ClassSampler,
        augmentations: Sequence[Augmentation | Center],
        *,
        seed: int,
        role: str,
        rank: int = 0,
        passes: int = 1,
    ):
        self.index, self.sampler, self.augmentations = index, sampler, tuple(augmentations)
        self.seed, self.role, self.rank = seed, role, rank
        self.passes, self.batch = passes, sampler.local_batch

    def __call__(self, number: int, replaced: Mapping[int, int] | None = None) -> BatchDraws:
        """Return this rank's draws at step `number`. `replaced` maps an undecodable image to the one in its place.

        A stand-in takes the row's draws with its own size and label: the crop box is drawn for the image that is read.
        """
        step, part = divmod(number, self.passes)
        block = part * self.sampler.world_size // self.passes + self.rank
        indices = np.asarray(self.sampler.rows(step, block), np.int64)
        if replaced:
            indices = np.array([replaced.get(int(i), i) for i in indices], np.int64)
        # self.batch and not len(indices): a sampler's last batch can be ragged.
        return _draws(self, step, indices, counter=step, first_row=block * self.batch)

    def stand_in(self, bad: int, attempt: int) -> int:
        """Return the image to show in place of `bad`: a pure function of (seed, role, bad, attempt).

        So all ranks agree without communication. A stream over a part of the images takes it from the bad image's own
        class in the first attempts, which keeps the batch balanced. A stream over all images takes any image: labels
        must not reach it, not even this way.
        """
        pool = self.sampler.indices
        (draw,) = uniform(self.seed, f"{self.role}/stand-in", (0, attempt, bad, 0), 1)
        if pool is None:
            return int(draw * len(self.index))
        if attempt < SAME_CLASS_ATTEMPTS:
            same_class = pool[self.index.labels[pool] == self.index.labels[bad]]
            pool = same_class if len(same_class) > 1 else pool
        return int(pool[int(draw * len(pool))])


# In a batch of 32 or more, a bad image that is no JPEG ends the process without a message (DALI 2.4 on a CPU).
MOST_OF_ANY_KIND = 31


class EvaluationPlan:
    """One pass over images: every image of `indices` once, in order, `batch` a step, the last batch ragged.

    Where a file is no JPEG, `batch` is MOST_OF_ANY_KIND at most.

    A random view v of the image at position p is a pure function of (seed, role, v, p). The positions of this rank's
    `indices` begin at `first`, so ranks that share a list see the views that one rank would.
    """

    def __init__(
        self,
        index: ImageIndex,
        indices: np.ndarray,
        batch: int,
        augmentations: Sequence[Augmentation | Center],
        *,
        seed: int = 0,
        role: str = "evaluation",
        first: int = 0,
    ):
        self.index, self.indices = index, np.asarray(indices, np.int64)
        names = map(index.name, self.indices.tolist() if index.pixels is None else ())
        jpeg = all(name.lower().endswith((".jpg", ".jpeg")) for name in names)
        self.batch = batch if jpeg else min(batch, MOST_OF_ANY_KIND)
        self.augmentations = tuple(augmentations)
        self.seed, self.role, self.first = seed, role, first

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch)

    def __call__(self, step: int, replaced: Mapping[int, int] | None = None) -> BatchDraws:
        """Return the draws of `step`. `replaced` must be empty: an evaluation shows every image."""
        assert not replaced
        if step >= len(self):
            raise StopIteration  # the end, for an engine that reads ahead
        start = step * self.batch
        indices = self.indices[start : start + self.batch]
        # The position is the only counter, whatever the batch size, so the step is always 0.
        return _draws(self, step, indices, counter=0, first_row=self.first + start)


def _draws(
    plan: Plan | EvaluationPlan, step: int, indices: np.ndarray, *, counter: int, first_row: int
) -> BatchDraws:
    """Return the draws of rows first_row, first_row + 1, ... at `counter`, which show the images `indices`."""
    sizes, views = plan.index.sizes[indices], []
    counters = {"seed": plan.seed, "step": counter, "first_row": first_row}
    for view, augmentation in enumerate(plan.augmentations):
        if isinstance(augmentation, Center):
            views.append(center_view(augmentation, sizes))
        else:
            views.append(draw_view(augmentation, sizes, role=f"{plan.role}/view {view}", **counters))
    return BatchDraws(step, indices, plan.index.labels[indices], tuple(views))
