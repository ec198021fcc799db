"""From a config to numbers of steps and images, given how many processes share it and how many images there
are.

An epoch is always one pass over the unlabeled images, the last incomplete batch dropped (over the labeled ones
where there is no other loss). The switch-off of supervision does not change the unlabeled batch: the labeled one
is left out from then on.
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
    large_views: int  # of each unlabeled image, as large as those of the labeled images
    small_views: int  # of each unlabeled image: SwAV's small crops
    global_unlabeled: int  # images
    local_unlabeled: int
    classes_per_batch: int  # the same classes on every process
    global_images_per_class: int  # labeled images, one view each
    local_images_per_class: int
    steps_per_epoch: int
    steps: int  # updates of the whole run
    supervised_steps: (
        int  # updates with supervision on: step < supervised_steps; all, if it may end by a plateau
    )
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

    @property
    def views(self) -> int:
        """Views of one unlabeled image."""
        return self.large_views + self.small_views

    def samples(self, step: int) -> int:
        """Views that go through the network in update `step`, over all processes."""
        return self.update_samples(step < self.supervised_steps)

    def update_samples(self, supervised: bool) -> int:
        """Views that go through the network in an update with or without labeled images, over all processes."""
        return self.views * self.global_unlabeled + (self.global_labeled if supervised else 0)

    def total_samples(self, steps: int | None = None) -> int:
        """Views over all processes in the first `steps` updates, in the whole run by default."""
        steps = self.steps if steps is None else steps
        on = min(steps, self.supervised_steps)
        return on * self.update_samples(True) + (steps - on) * self.update_samples(False)


def arithmetic(
    config: Sections,
    world_size: int,
    num_images: int,
    num_classes: int | None = None,
    num_labeled: int | None = None,
) -> tuple[Arithmetic | None, list[Problem]]:
    """The sizes, or what does not fit. `num_classes` counts the classes that have a labeled image, where known;
    `num_labeled` those images, where not all are labeled.
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

    alone = c.instance == "none"
    check(
        alone or unlabeled >= 2,
        "criterion.unsupervised_batch_size",
        "is 1 image over all processes, which has no negative to be contrasted with; 2 are the least",
    )
    check(
        not c.contrasts_labels or per_class >= 2,
        "criterion.supervised_imgs_per_class",
        "is 1 image of a class over all processes, which has no positive; 2 are the least",
    )
    check(
        num_classes is None or classes <= num_classes,
        "criterion.classes_per_batch",
        f"must be at most {num_classes}: that many classes have a labeled image",
    )
    if alone:
        available, batch = num_images if num_labeled is None else num_labeled, classes * per_class
        steps_per_epoch = available // batch if batch else 0
        check(
            steps_per_epoch > 0,
            "criterion.supervised_imgs_per_class",
            f"a batch of {batch:,} labeled images over all processes is larger than the {available:,} there are",
        )
    else:
        steps_per_epoch = num_images // max(unlabeled, 1)
        check(
            steps_per_epoch > 0,
            "criterion.unsupervised_batch_size",
            f"a batch of {unlabeled:,} images over all processes is larger than the data set of {num_images:,}",
        )
    if problems:
        return None, problems
    # `plateau` is not known before the run: until then supervision may last to the end.
    on = None if c.supervised_epochs in ("all", "plateau") else c.supervised_epochs * steps_per_epoch
    if c.labeled_share is not None:
        views, visits = 2 * unlabeled + classes * per_class, on * per_class  # visits to each class of a batch
        local_per_class = round(c.labeled_share * views / classes / world_size)
        per_class = local_per_class * world_size
        local_unlabeled = max(0, views - classes * per_class) // 2 // world_size
        unlabeled = local_unlabeled * world_size
        check(
            per_class >= 2 and unlabeled >= 2,
            "criterion.labeled_share",
            f"of {views:,} views an update leaves {per_class} labeled images of each of {classes} classes over all "
            f"processes, and {unlabeled:,} unlabeled ones; of both 2 are the least",
        )
        if problems:
            return None, problems
        steps_per_epoch = num_images // unlabeled
        on = round(visits / per_class)
    steps = o.steps if o.steps is not None else o.epochs * steps_per_epoch
    warmup_steps = round(o.warmup * steps_per_epoch)
    check(
        steps == 0 or warmup_steps < steps,
        "optimization.warmup",
        f"must be shorter than the run: {o.warmup:g} epochs are {warmup_steps:,} steps of {steps:,}",
    )
    check(
        c.labeled_share is None or on <= steps,
        "criterion.labeled_share",
        f"would need {on or 0:,} updates for as many passes through the labeled images, and the run has {steps:,}",
    )
    if problems:
        return None, problems
    return Arithmetic(
        world_size=world_size,
        num_images=num_images,
        large_views=0 if alone else 2,
        small_views=config.swav.small_crops if c.instance == "swav" else 0,
        global_unlabeled=unlabeled,
        local_unlabeled=local_unlabeled,
        classes_per_batch=classes,
        global_images_per_class=per_class,
        local_images_per_class=local_per_class,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        supervised_steps=steps if on is None else min(steps, on),
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
