"""From a config to numbers of steps and images, given how many processes share it and how many images there
are.

An epoch is always one pass over the unlabeled images, the last incomplete batch dropped. The switch-off of
SuNCEt does not change the unlabeled batch: the labeled one is left out from then on.
"""

from dataclasses import dataclass

from fastsuncet.config.problems import Problem, words
from fastsuncet.config.schema import Sections
from fastsuncet.config.types import PerRank


@dataclass(frozen=True)
class Arithmetic:
    """The sizes of a run. `global_` counts over all processes, `local_` on each. Images give views: see
    `samples`.
    """

    world_size: int
    num_images: int
    global_unlabeled: int  # images, two views each
    local_unlabeled: int
    classes_per_batch: int  # the same classes on every process
    global_images_per_class: int  # labeled images, one view each
    local_images_per_class: int
    steps_per_epoch: int
    steps: int  # updates of the whole run
    supervised_steps: int  # updates with SuNCEt on: step < supervised_steps
    warmup_steps: int

    @property
    def global_labeled(self) -> int:
        """Labeled images of one supervised step over all processes."""
        return self.classes_per_batch * self.global_images_per_class

    @property
    def local_labeled(self) -> int:
        """Labeled images of one supervised step on each process."""
        return self.classes_per_batch * self.local_images_per_class

    @property
    def epochs(self) -> float:
        """Passes over the unlabeled images; a fraction where a run is given in steps."""
        return self.steps / self.steps_per_epoch

    def samples(self, step: int) -> int:
        """Views that go through the network in update `step`, over all processes."""
        return 2 * self.global_unlabeled + (self.global_labeled if step < self.supervised_steps else 0)

    def total_samples(self, steps: int | None = None) -> int:
        """Views over all processes in the first `steps` updates, in the whole run by default."""
        steps = self.steps if steps is None else steps
        return 2 * self.global_unlabeled * steps + self.global_labeled * min(steps, self.supervised_steps)


def arithmetic(
    config: Sections, world_size: int, num_images: int, num_classes: int | None = None
) -> tuple[Arithmetic | None, list[Problem]]:
    """The sizes, or what does not fit. `num_classes` counts the classes that have a labeled image, where
    known.
    """
    if world_size < 1:
        raise ValueError(f"a world has at least one process, not {world_size}")
    c, o, problems = config.criterion, config.optimization, []

    def share(key: str, size: int | PerRank) -> tuple[int, int]:
        """(over all processes, on each)."""
        if isinstance(size, PerRank):
            return size.per_rank * world_size, size.per_rank
        if size % world_size:
            problems.append(Problem(f"criterion.{key}", _indivisible(size, world_size)))
        return size, size // world_size

    unlabeled, local_unlabeled = share("unsupervised_batch_size", c.unsupervised_batch_size)
    per_class, local_per_class, classes = 0, 0, 0
    if c.supervised:
        classes = c.classes_per_batch
        per_class, local_per_class = share("supervised_imgs_per_class", c.supervised_imgs_per_class)

    def check(holds: bool, key: str, text: str) -> None:
        if not holds:
            problems.append(Problem(key, text))

    check(
        unlabeled >= 2,
        "criterion.unsupervised_batch_size",
        "is 1 image over all processes, which has no negative to be contrasted with; 2 are the least",
    )
    check(
        not c.supervised or per_class >= 2,
        "criterion.supervised_imgs_per_class",
        "is 1 image of a class over all processes, which has no positive; 2 are the least",
    )
    check(
        num_classes is None or classes <= num_classes,
        "criterion.classes_per_batch",
        f"must be at most {num_classes}: that many classes have a labeled image",
    )
    steps_per_epoch = num_images // unlabeled
    check(
        steps_per_epoch > 0,
        "criterion.unsupervised_batch_size",
        f"a batch of {unlabeled:,} images over all processes is larger than the data set of {num_images:,}",
    )
    steps = o.steps if o.steps is not None else o.epochs * steps_per_epoch
    warmup_steps = round(o.warmup * steps_per_epoch)
    check(
        steps == 0 or warmup_steps < steps,
        "optimization.warmup",
        f"must be shorter than the run: {o.warmup:g} epochs are {warmup_steps:,} steps of {steps:,}",
    )
    if problems:
        return None, problems
    on = steps if c.supervised_epochs == "all" else min(steps, c.supervised_epochs * steps_per_epoch)
    return Arithmetic(
        world_size=world_size,
        num_images=num_images,
        global_unlabeled=unlabeled,
        local_unlabeled=local_unlabeled,
        classes_per_batch=classes,
        global_images_per_class=per_class,
        local_images_per_class=local_per_class,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        supervised_steps=on,
        warmup_steps=warmup_steps,
    ), []


def _indivisible(size: int, world_size: int) -> str:
    below = size - size % world_size
    numbers = [number for number in (below, below + world_size) if number]
    fewer = next(n for n in range(world_size - 1, 0, -1) if size % n == 0)
    more = next((n for n in range(world_size + 1, min(size, 4 * world_size) + 1) if size % n == 0), None)
    counts = words([n for n in (fewer, more) if n])
    return (
        f"counts images over all processes, and {size:,} cannot be shared by {world_size}. Either make it "
        f"{words(f'{n:,}' for n in numbers)}, or use {counts} process{'' if counts == '1' else 'es'}"
    )
