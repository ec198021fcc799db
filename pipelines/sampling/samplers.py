"""Which images a step sees: pure functions of (seed, step, rank), in NumPy, with nothing to save or restore.

Each sampler describes the *global* batch of a step and lets a rank cut out its rows, so the images of a step do not
depend on how many processes share it: two ranks of 64 see what one process of 128 sees, in that order.

A step is any integer >= 0. An epoch is a way of counting steps, never an iterator that ends: trainers driven by
exhausted iterators have silently trained on half their steps.
"""

import functools
from collections.abc import Sequence

import numpy as np

from pipelines.output import counted, first_five

# Philox streams by purpose. Those of the augmentations have hashes of names: a change there changes no order of images.
EPOCH_ROLE = 2**32
CLASS_ROLE = 2**32 + 1
IMAGE_ROLE = 2**32 + 2


def permutation(size: int, *, seed: int, role: int, counter: tuple[int, int]) -> np.ndarray:
    """Return a permutation of 0..size-1, int64 (size,): the same on every machine, process and NumPy version.

    `seed` is 0..2**64-1. `counter` (for example class and pass) sets the two high words of Philox's 256-bit counter:
    two counters are 2**128 draws apart and never overlap.
    """
    key, start = np.array([seed, role], np.uint64), np.array([0, 0, *counter], np.uint64)
    # NumPy promises stable streams for bit generators but not for Generator.permutation, and a run continued under
    # another NumPy must see the same images. Sorting raw words takes six times as long for ImageNet's 1.28 million
    # images: a tenth of a second once an epoch.
    return np.argsort(np.random.Philox(key=key, counter=start).random_raw(size), kind="stable")


class UnlabeledSampler:
    """Every image once an epoch, in a fresh order each epoch, in global batches; the remainder is dropped.

    The images are 0..num_images-1, or `indices`, int64 (num_images,), whose own order does not matter. Attributes:
    `global_batch`, `world_size`, `local_batch` (= global_batch / world_size), `steps_per_epoch`
    (= num_images // global_batch, recipe 2.2). Other images make up the dropped remainder each epoch. The config's
    `resolve` has checked that the ranks can share the batch and that the images fill it, as for `ClassSampler`.
    """

    def __init__(
        self,
        num_images: int,
        global_batch: int,
        world_size: int,
        seed: int,
        indices: np.ndarray | None = None,
    ):
        assert global_batch % world_size == 0
        self.local_batch = global_batch // world_size
        self.num_images, self.global_batch = num_images, global_batch
        self.world_size, self.seed = world_size, seed
        self.steps_per_epoch = num_images // global_batch
        self.indices = None if indices is None else np.sort(np.asarray(indices, np.int64))
        # Two epochs are kept: the loader reads ahead into the next epoch while the step just done is asked about, and
        # sorting a million keys for each such question would stall the queue.
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def _draw_order(self, epoch: int) -> np.ndarray:
        order = permutation(self.num_images, seed=self.seed, role=EPOCH_ROLE, counter=(0, epoch))
        return order if self.indices is None else self.indices[order]

    def rows(self, step: int, rank: int) -> np.ndarray:
        """Return image indices, int64 (local_batch,), of `rank` at `step`: its cut of the step's global batch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.global_batch + rank * self.local_batch
        # A copy, so that a batch kept for a report does not keep its whole epoch's order alive.
        return self._order(epoch)[first : first + self.local_batch].copy()


class ClassSampler:
    """Labeled batches by class (recipe 2.3): m images of each of C classes, over all ranks.

    `indices` int64 (L,) are the labeled images' numbers in the data set, `labels` int64 (L,) their classes. With
    C = `classes_per_batch` and m = `images_per_class`, the global batch has m rows of C classes, interleaved [a, b, c,
    a, b, c, ...]: row i is of class i % C, and a rank's rows are the C * m / world_size from `rank * local_batch` on.
    Where m is a multiple of `world_size`, every rank has equally many images of each class; else some classes are on
    some ranks only. `class_names` names classes 0, 1, ... in messages and lets the sampler report those without any
    labeled image.

    Classes: cycle k is a fresh permutation of the classes cut into chunks of C, one a step, so every class is visited
    once a cycle. Where C does not divide their number, a remainder, drawn anew, is left out.

    Images: a visit takes m images of its class. A class with n_c >= m images makes floor(n_c / m) visits out of one
    permutation of all its images (a cycle that leaves it out counts as one), then draws the next: no image twice in a
    visit, and none reserved for a rank. A class with n_c < m goes round one permutation, a fresh one each visit: any
    n_c images in a row are distinct, and one is used at most once more than another. `notes()` names such classes.
    """

    def __init__(
        self,
        indices: np.ndarray,
        labels: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        world_size: int,
        seed: int,
        class_names: Sequence[str] = (),
    ):
        indices, labels = np.asarray(indices, np.int64), np.asarray(labels, np.int64)
        self.indices = indices
        # The labels that an image has, ascending, and how many images have each. A slot is a position in them.
        self._classes, self._counts = np.unique(labels, return_counts=True)
        self.classes_per_batch, self.images_per_class = classes_per_batch, images_per_class
        self.world_size, self.seed = world_size, seed
        self.class_names = tuple(class_names) or tuple(map(str, range(int(labels.max()) + 1)))
        assert classes_per_batch * images_per_class % world_size == 0
        self.local_batch = classes_per_batch * images_per_class // world_size
        self.steps_per_cycle = len(self._classes) // classes_per_batch
        # Ascending inside each class: in whatever order the images were listed, the draw is the same.
        self._images = indices[np.lexsort((indices, labels))]
        # The images of each class in its present order, and the number of the permutation that made it.
        self._ordered, self._permutations = self._images.copy(), np.full(len(self._classes), -1)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._cycle = -1, self._classes  # the latest cycle and its order

    def _slots(self, step: int) -> np.ndarray:
        """Return the slots, int64 (C,), of the classes of `step`."""
        cycle, chunk = divmod(step, self.steps_per_cycle)
        if self._cycle[0] != cycle:
            order = permutation(len(self._classes), seed=self.seed, role=CLASS_ROLE, counter=(0, cycle))
            self._cycle = cycle, order
        return self._cycle[1][chunk * self.classes_per_batch : (chunk + 1) * self.classes_per_batch]

    def classes(self, step: int) -> np.ndarray:
        """Return labels, int64 (C,), of the classes of `step`; row i of the global batch is of class i % C."""
        return self._classes[self._slots(step)]

    def rows(self, step: int, rank: int) -> np.ndarray:
        """Return image indices, int64 (local_batch,), of `rank` at `step`, interleaved [a, b, c, a, b, c, ...]."""
        m, slots = self.images_per_class, self._slots(step)
        counts = self._counts[slots]
        # A class is visited at most once a cycle, and a permutation of its images lasts counts // m visits.
        numbers, turns = np.divmod(step // self.steps_per_cycle, np.maximum(1, counts // m))
        # Few classes begin a permutation at a step, unless they are too small for two visits.
        stale = self._permutations[slots] != numbers
        for slot, number in zip(slots[stale].tolist(), numbers[stale].tolist()):
            self._shuffle(slot, number)
        mine = np.arange(rank * self.local_batch, (rank + 1) * self.local_batch)
        visit, of_class = np.divmod(mine, len(slots))
        return self._ordered[
            self._firsts[slots][of_class] + ((turns * m)[of_class] + visit) % counts[of_class]
        ]

    def _shuffle(self, slot: int, number: int) -> None:
        """Put the images of one class into the order of its permutation `number`."""
        own = slice(self._firsts[slot], self._firsts[slot] + self._counts[slot])
        # Keyed by the label, not by the slot: labeling images of a new class does not change this one's order.
        counter = (int(self._classes[slot]), number)
        order = permutation(int(self._counts[slot]), seed=self.seed, role=IMAGE_ROLE, counter=counter)
        self._ordered[own], self._permutations[slot] = self._images[own][order], number

    def notes(self) -> list[str]:
        """Return sentences to print once before a run: which classes are too few, or too small, for this batch."""
        m, count, notes = self.images_per_class, len(self._classes), []
        n = -(-self.local_batch // self.classes_per_batch)  # images of a class on a rank, at most
        if empty := sorted(set(range(len(self.class_names))) - set(self._classes.tolist())):
            names = first_five([self.class_names[label] for label in empty])
            notes.append(f"{len(empty)} of {len(self.class_names)} classes have no labeled image: {names}")
        if left_out := count % self.classes_per_batch:
            steps = counted(self.steps_per_cycle, "step")
            text = f"{self.classes_per_batch} classes a batch do not divide {count} classes"
            notes.append(f"{text}: each round of {steps} leaves out {left_out}, drawn anew")
        shared, repeated = (n <= self._counts) & (self._counts < m), self._counts < n
        for which, why in (
            (shared, f"the {m} a batch takes: several ranks take the same image"),
            (repeated, f"the {n} a rank takes: it takes an image more than once"),
        ):
            if which.any():
                sizes = zip(self._classes[which].tolist(), self._counts[which].tolist())
                names = first_five([f"{self.class_names[label]} ({size})" for label, size in sizes])
                text = f"{which.sum()} of {count} classes have fewer labeled images than {why}"
                notes.append(f"{text}, each time with another augmentation: {names}")
        return notes
