"""The sizes of a run in images and steps, from a config, the number of processes and the number of images.

An epoch is always one pass over the unlabeled images without the last incomplete batch (over the labeled images where
there is no other loss). Switching supervision off does not change the unlabeled batch: only the labeled batch is left
out from then on.
"""

import math
from dataclasses import dataclass

from fastsuncet.config.problems import ConfigErrors, Problem, words
from fastsuncet.config.schema import WITH_SMALL_CROPS, PerRank, Sections
from pipelines.output import counted


@dataclass(frozen=True)
class Arithmetic:
    """The sizes of a run. `global_` counts over all processes, `local_` on each. `update_views` counts views."""

    world_size: int
    num_images: int
    large_views: int  # of each unlabeled image, as large as those of the labeled images
    small_views: int  # of each unlabeled image: small crops of SwAV and PAWS
    global_unlabeled: int  # images
    local_unlabeled: int
    classes_per_batch: int  # over all processes
    global_images_per_class: int  # labeled images
    labeled_views: int  # of each labeled image
    local_micro_batch: int | None  # views that pass through the network at a time on each process; None: all
    steps_per_epoch: int
    steps: int  # updates of the whole run
    # Updates with supervision on: step < supervised_steps. All of them, if a plateau can end it.
    supervised_steps: int
    warmup_steps: int

    @property
    def global_labeled(self) -> int:
        """Views of labeled images of one supervised step over all processes."""
        return self.classes_per_batch * self.global_images_per_class * self.labeled_views

    @property
    def local_labeled(self) -> int:
        """Views of labeled images of one supervised step on each process."""
        return self.global_labeled // self.world_size

    @property
    def views(self) -> int:
        """Views of one unlabeled image."""
        return self.large_views + self.small_views

    def pieces(self, supervised: bool) -> list[tuple[int, int]]:
        """Return the `piece_sizes` of an update on each process, with or without labeled images."""
        labeled = self.local_labeled if supervised else 0
        return piece_sizes(self.local_unlabeled, labeled, self.views, self.local_micro_batch)

    def update_views(self, supervised: bool) -> int:
        """Return the views of an update with or without labeled images, over all processes."""
        return self.views * self.global_unlabeled + (self.global_labeled if supervised else 0)


def piece_sizes(unlabeled: int, labeled: int, views: int, most: int | None) -> list[tuple[int, int]]:
    """Return (unlabeled images, labeled images) of each piece of one process's batch, the largest piece first.

    They are the fewest pieces of at most `most` views, equal in both kinds up to one image; None: one piece. A piece
    has an unlabeled image with all its `views`, or two where one of them is a small crop, or two labeled ones where
    there are no others: BatchNorm needs two rows of a size. Where `most` is less, pieces are as small as possible.
    """
    if most is None:
        return [(unlabeled, labeled)]
    last = max(1, (unlabeled if views else labeled) // (2 if views in (0, 3) else 1))
    fitting = (n for n in range(1, last) if views * -(-unlabeled // n) + -(-labeled // n) <= most)
    count = next(fitting, last)
    images, images_left = divmod(unlabeled, count)
    labels, labels_left = divmod(labeled, count)
    return [(images + (n < images_left), labels + (n < labels_left)) for n in range(count)]


def arithmetic(
    config: Sections, world_size: int, num_images: int, num_classes: int | None, num_labeled: int | None
) -> Arithmetic:
    """Return what `Config.resolve` does. Raises ConfigErrors, without lines, with every size that does not fit."""
    c, o, problems = config.criterion, config.optimization, list[Problem]()

    def wrong(key: str, text: str) -> None:
        problems.append(Problem(key, text))

    def total(size: int | PerRank) -> int:
        return size.per_rank * world_size if isinstance(size, PerRank) else size

    labels_alone, unlabeled = c.instance == "none", total(c.unsupervised_batch_size)
    classes = c.classes_per_batch if c.supervised else 0
    per_class = total(c.supervised_imgs_per_class) if c.supervised else 0
    batch_key, class_key = "criterion.unsupervised_batch_size", "criterion.supervised_imgs_per_class"
    for key, size, times in ((batch_key, unlabeled, 1), (class_key, per_class, classes)):
        if size * times % world_size:
            wrong(key, _indivisible(size, times, world_size))
    if unlabeled < 2 and not labels_alone:
        wrong(batch_key, "is 1 image over all processes, which has no negative; at least 2 are needed")
    if per_class < 2 and c.contrasts_labels:
        text = "is 1 image of a class over all processes, which has no positive; at least 2 are needed"
        wrong(class_key, text)
    if num_classes == 0 and classes:
        key, fix = "kind", "choose another"
        if config.data.split.kind == "bernoulli":
            key, fix = "fraction", "raise it"
        wrong(f"data.split.{key}", f"selects no labeled image: {fix}, or label more images")
    elif num_classes is not None and classes > num_classes:
        few = f"must be at most {num_classes}: that many classes have a labeled image"
        if num_classes == 1:
            few = "needs labels of 2 classes or more, and only 1 class has a labeled image: label images of another one"
            few += ", or write criterion.supervised_epochs: 0" if not c.needs_labels else ""
        wrong("criterion.classes_per_batch", few)
    key, kind, batch, there = batch_key, "images", unlabeled, num_images
    if labels_alone:
        key, kind, batch = class_key, "labeled images", classes * per_class
        there = num_images if num_labeled is None else num_labeled
    if not 0 < batch <= there:
        wrong(key, f"a batch of {batch:,} {kind} over all processes is larger than the {there:,} there are")
    if problems:
        raise ConfigErrors(problems)
    steps_per_epoch = there // batch
    # When a plateau ends supervision is not known before the run: until then it can last to the end.
    on = c.supervised_epochs * steps_per_epoch if isinstance(c.supervised_epochs, int) else None
    if c.labeled_share is not None and on is not None:
        labeled_views = classes * c.supervised_views  # of one image of each class
        views, visits = 2 * unlabeled + labeled_views * per_class, on * per_class  # visits to each class
        per_class = round(c.labeled_share * views / labeled_views / world_size) * world_size
        unlabeled = max(0, views - labeled_views * per_class) // 2 // world_size * world_size
        if per_class < 2 or not 2 <= unlabeled <= num_images:
            text = (
                f"of {views:,} views an update leaves {per_class} labeled images of each of {classes} classes over all "
                f"processes, and {unlabeled:,} unlabeled ones of {num_images:,}; at least 2 of both are needed"
            )
            raise ConfigErrors([Problem("criterion.labeled_share", text)])
        steps_per_epoch = num_images // unlabeled
        on = round(visits / per_class)
    small_views = config.swav.small_crops if c.instance in WITH_SMALL_CROPS else 0
    views = small_views + (0 if labels_alone else 2)
    micro_batch = c.micro_batch // world_size if c.micro_batch is not None else None
    local_labeled = classes * per_class * c.supervised_views // world_size
    pieces = piece_sizes(unlabeled // world_size, local_labeled, views, micro_batch)
    largest = views * pieces[0][0] + pieces[0][1]
    if micro_batch is not None and largest > micro_batch:
        text = (
            f"must be {largest * world_size:,} or more with {counted(world_size, 'process')}: a piece has "
            f"{largest} views or more on each, of {pieces[0][0]:,} unlabeled and {pieces[0][1]:,} labeled images"
        )
        raise ConfigErrors([Problem("criterion.micro_batch", text)])
    steps = o.steps if o.steps is not None else (o.epochs or 0) * steps_per_epoch
    warmup_steps = round(o.warmup * steps_per_epoch)
    length = f"{o.warmup:g} epochs are {warmup_steps:,} steps of {steps:,}"
    if 0 < steps <= warmup_steps:
        wrong("optimization.warmup", f"must be shorter than the run: {length}")
    if o.legacy_schedule and warmup_steps and 0 < steps <= 2 * warmup_steps:
        wrong("optimization.warmup", f"must be shorter than half of the run with legacy_schedule: {length}")
    if c.labeled_share is not None and on is not None and not 1 <= on <= steps:
        text = f"draws {per_class:,} images of each class an update: as many passes over the labels take "
        text += f"{on:,} whole updates of {steps:,}; {'raise' if on else 'lower'} it"
        wrong("criterion.labeled_share", text)
    if problems:
        raise ConfigErrors(problems)
    return Arithmetic(
        world_size=world_size,
        num_images=num_images,
        large_views=0 if labels_alone else 2,
        small_views=small_views,
        global_unlabeled=unlabeled,
        local_unlabeled=unlabeled // world_size,
        classes_per_batch=classes,
        global_images_per_class=per_class,
        labeled_views=c.supervised_views,
        local_micro_batch=micro_batch,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        supervised_steps=steps if on is None else min(steps, on),
        warmup_steps=warmup_steps,
    )


def _indivisible(size: int, times: int, world_size: int) -> str:
    """Return what to say about `size` images, of each of `times` classes, that `world_size` processes cannot share."""
    unit, total = world_size // math.gcd(world_size, times), size * times
    below = size - size % unit
    numbers = [number for number in (below, below + unit) if number]
    fewer = next(n for n in range(world_size - 1, 0, -1) if total % n == 0)
    more = next((n for n in range(world_size + 1, min(total, 4 * world_size) + 1) if total % n == 0), None)
    counts = words([n for n in (fewer, more) if n])
    of_each = f" of each of {times} classes" if times > 1 else ""
    return (
        f"counts images over all processes, and {size:,}{of_each} cannot be shared by {world_size}. Either make it "
        f"{words(f'{n:,}' for n in numbers)}, or use {counts} process{'' if counts == '1' else 'es'}"
    )
