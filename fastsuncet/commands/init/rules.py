"""The rules of `fastsuncet init`: from images, labels, a machine and hours to a config, each choice with its reason.

Read `choose` from top to bottom. A choice that was measured names RESULTS.md. All others are the usual ones, and their
reasons say no more. docs/methods.md has the rules in words.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastsuncet.models.flops import memory_estimate, network_cost
from pipelines.datasets.index import ImageIndex

SIZES = (224, 160, 128, 96, 64, 48, 32)  # of a view, in pixels
SMALL = 40  # images of fewer pixels have the networks' stem for small images, and no published weights
SHARP = 64  # views of at most as many pixels are not blurred: sigma, up to 2 pixels, is meant for 224
FEW_PASSES = 100  # fewer passes over the images than this are too few for a contrastive loss
# 3,068 photos were too few for a contrastive loss to be ahead, 50,000 images enough (RESULTS.md).
FEW_IMAGES = 10_000
MANY_IMAGES = 100_000
FEW_LABELS = 20  # of a class: SuNCEt is ahead of cross-entropy with 10, behind it with 50
MANY_LABELS = 0.5  # share of the images from which on the other images are left out
HOLD_OUT_FROM = 100  # labels
FEW_UPDATES, FEWEST_UPDATES = 300, 100  # of labels alone: said to be few; never fewer
TRAINING = 0.8  # share of the hours for updates: the rest is start, evaluations and checkpoints
LABELED = 0.31  # share of the views of an update, as in the runs of RESULTS.md
MOST_PASSES = 800  # SimCLR's longest run has 1,000 epochs
HEAD = (2048, 128)  # of the network that is counted, which takes a second: the same one for time and memory
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Survey:
    """What the rules know of the images."""

    data: dict[str, str]  # keys of the section data: kind, and where the images are
    images: int
    labels: int  # images with a label
    classes: int  # with a labeled image
    side: int  # median of the shorter sides, in pixels
    read_seconds: float  # of one thread, to read and decode one image
    validation: str | None = None  # folder of validation images, or a CSV
    bad: int = 0  # images whose header cannot be read
    index: ImageIndex | None = None  # that the runs can begin with; a pack has its own


@dataclass(frozen=True)
class Machine:
    """What the rules know of the machine."""

    device: str  # "cpu" or "cuda"
    name: str
    count: int  # GPUs, or 1
    memory: float  # bytes of one GPU, or of the machine
    cores: int
    macs_per_second: float  # of one GPU or of all cores, in forward and backward passes; a timed step


@dataclass(frozen=True)
class Weights:
    """The weights that the encoder starts from."""

    init: str  # model.init
    name: str | None = None  # model.name that they are of; None: any that timm has weights of
    stem: str = "imagenet"
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    least: int = 96  # pixels of a view: of smaller ones, weights from 224 pixels lose much


@dataclass(frozen=True)
class Choice:
    """One line of the config."""

    key: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class Proposal:
    """The chosen config and what it takes."""

    choices: tuple[Choice, ...]
    method: str
    updates: int
    hours: float  # predicted
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Batch:
    unlabeled: int
    classes: int = 0
    per_class: int = 0

    @property
    def labeled(self) -> int:
        return self.classes * self.per_class

    @property
    def views(self) -> int:
        return 2 * self.unlabeled + self.labeled


def choose(s: Survey, m: Machine, hours: float, weights: Weights | None, why_scratch: str = "") -> Proposal:
    """Return the proposal for these images on this machine in `hours`; `why_scratch` is why there are no `weights`."""
    notes: list[str] = []

    # ---- network
    small = s.side <= SMALL
    if small and weights is not None and weights.stem == "imagenet":
        weights, why_scratch = None, f"published weights are of larger images than these of {s.side} pixels"
    if why_scratch not in ("", "--weights none"):
        notes.append(f"the network starts from scratch, which as a rule costs accuracy: {why_scratch}")
    gpu = m.device == "cuda"
    large = gpu and (weights is not None or s.images >= 20_000)
    name = (weights.name if weights else None) or ("resnet50" if large else "resnet18")
    stem = "cifar" if small else weights.stem if weights else "imagenet"
    if weights and weights.name:
        why_name = "the network of the weights"
    else:
        small_for = "few images" if gpu else "quick on a CPU"
        why_name = "a GPU and enough images" if large else f"small: {small_for}"

    # ---- device: a few images do not fill several GPUs
    cards = m.count
    if cards > 1 and min(s.images, s.labels or s.images) < 4 * cards:
        gpu, cards = False, 1
        notes.append(f"so few images do not fill {m.count} GPUs: the run uses the CPU")

    # ---- method, image size and length: the largest size at which the hours are enough
    budget = TRAINING * 3600 * hours  # seconds of updates
    contrast_batch = partial(_contrast_batch, s, m, cards, gpu, name, stem)

    def seconds(batch: _Batch, size: int) -> float:
        """Return the seconds of an update: two views of an image are decoded once, labeled images one by one."""
        # A backward pass costs two forward ones.
        macs = 3 * batch.views * network_cost(name, stem, size, *HEAD).macs
        compute = macs / (m.macs_per_second * cards)
        reading = (batch.unlabeled + batch.labeled) * s.read_seconds / m.cores
        return max(compute, reading) if gpu else compute + reading

    def passes(size: int) -> float:
        batch = contrast_batch(size)
        return budget / seconds(batch, size) / max(1, s.images // batch.unlabeled)

    sides = [size for size in SIZES if size <= max(s.side, SIZES[-1])]
    least_side = weights.least if weights else 32 if small else 48
    sides = [size for size in sides if size >= least_side] or sides[:1]
    enough = next((size for size in sides if passes(size) >= FEW_PASSES), None)
    few = enough is None or s.images < FEW_IMAGES
    alone = bool(s.labels) and (few or s.labels >= MANY_LABELS * s.images)
    if alone:
        batch = _labeled_batch(s, cards, gpu)
        # 100 passes over the labels, or 2,000 updates where that is more
        most = max(2000, 100 * s.labels // batch.labeled)
        wanted = FEW_UPDATES if weights else most
        size = next((x for x in sides if wanted * seconds(batch, x) <= budget), sides[-1])
        updates = max(FEWEST_UPDATES, min(most, int(budget / seconds(batch, size))))
        epochs = updates / max(1, labels_left(s) // batch.labeled)
        length = Choice("optimization.steps", updates, f"{epochs:,.0f} passes over the labels")
        if updates < FEW_UPDATES:
            notes.append(f"{updates} updates are few: more hours would help")
    else:
        size = enough or sides[-1]
        batch = contrast_batch(size)
        epochs = max(1, min(MOST_PASSES, int(passes(size))))
        updates = epochs * max(1, s.images // batch.unlabeled)
        length = Choice("optimization.epochs", epochs, f"passes over the images: {updates:,} updates")
        if enough is None and weights is None:
            notes.append(f"few passes for SimCLR ({epochs}): more hours, or labels, would help most")
    predicted = updates * seconds(batch, size) / 3600 / TRAINING
    if predicted > 1.01 * hours:
        notes.append(f"the shortest sensible run takes longer than --hours {hours:g}")

    suncet = s.images >= MANY_IMAGES or labels_left(s) <= FEW_LABELS * s.classes
    supervision = "suncet" if suncet and not alone else "cross_entropy"
    validation, why_validation = s.validation, "never learned from"
    if not s.labels:
        validation, why_validation = None, "no labels to measure with"
    elif labels_left(s) < s.labels:
        validation = 0.2
        why_validation = "a fifth of the labels tells the accuracy; the run learns from the others"
    elif not validation:
        why_validation = "too few labels to hold any out"

    choices = [*_data(s, size, weights, validation, why_validation), Choice("model.name", name, why_name)]
    if small:
        choices.append(Choice("model.stem", stem, "for images this small"))
    why_init = "as asked for" if weights else f"from scratch: {why_scratch}"
    if weights and weights.init == "timm":
        why_init = "published weights, as a rule far better than from scratch"
    choices.append(Choice("model.init", weights.init if weights else None, why_init))
    choices.append(Choice("model.hidden", 512 if name == "resnet18" else 2048, "of the projection head"))
    choices += _criterion(s, batch, alone, supervision, enough, hours)
    choices += _optimization(batch, length, epochs, weights)
    if not gpu and m.device != "cpu":
        choices.append(Choice("meta.device", "cpu", "too few images for these GPUs"))
    choices += _evaluation(s, cards, validation, epochs)
    loss = {"suncet": " + SuNCEt", "cross_entropy": " + cross-entropy"}[supervision]
    contrast = f"SimCLR{loss if s.labels else ', without labels'}"
    method = "labels alone, cross-entropy" if alone else contrast
    return Proposal(tuple(choices), method, updates, predicted, tuple(notes))


def _data(
    s: Survey, size: int, weights: Weights | None, validation: str | float | None, why: str
) -> Iterator[Choice]:
    if s.labels:
        kind = "csv" if s.data["kind"] == "csv" else "all"
        yield Choice("data.split.kind", kind, f"all {s.labels:,} labels")
    yield Choice("data.validation", validation, why)
    if s.bad:
        yield Choice("data.bad_images", s.bad, f"{s.bad:,} files cannot be read; others take their places")
    shown = f"of images whose shorter side is {s.side}"
    why_size = f"{shown}: all of it" if size == min(SIZES, key=lambda x: abs(x - s.side)) else shown
    yield Choice("data.augmentation.size", size, f"{why_size}; larger costs its square in time")
    yield Choice(
        "data.augmentation.crop_scale", [0.2, 1.0], "crops from 8 % of the area hide what few images show"
    )
    if size <= SHARP:
        yield Choice("data.augmentation.blur", 0.0, "views this small lose what they show")
    if weights:
        yield Choice("data.augmentation.mean", list(weights.mean), "the weights were trained on these colors")
        yield Choice("data.augmentation.std", list(weights.std))


def _criterion(
    s: Survey, b: _Batch, alone: bool, supervision: str, enough: int | None, hours: float
) -> Iterator[Choice]:
    if alone and s.labels >= MANY_LABELS * s.images:
        yield Choice("criterion.instance", "none", "most images have labels, which teach more than contrast")
    elif alone:
        passes = f"--hours {hours:g} gives fewer than {FEW_PASSES} passes"
        why = passes if enough is None else f"there are fewer than {FEW_IMAGES:,} images"
        yield Choice("criterion.instance", "none", f"labels alone: {why}, too few for contrast")
    else:
        yield Choice("criterion.instance", "nt_xent", "SimCLR: two views of an image agree")
    if s.labels:
        count = "few" if supervision == "suncet" else "many"
        measured = f"ahead on CIFAR-10 with as {count} labels of a class (RESULTS.md)"
        why = measured if s.images < MANY_IMAGES else "the paper's, at this number of images"
        yield Choice("criterion.supervision", supervision, "" if alone else why)
    yield Choice("criterion.temperature", 0.1, "" if alone else "the paper's")
    yield Choice(
        "criterion.unsupervised_batch_size", b.unlabeled, "" if alone else "images an update, two views each"
    )
    if s.labels:
        why = "all classes" if b.classes == s.classes else f"of {s.classes:,}, in turn"
        yield Choice("criterion.classes_per_batch", b.classes, why)
        share = "no other images" if alone else f"{b.labeled / b.views:.0%} of the views"
        yield Choice("criterion.supervised_imgs_per_class", b.per_class, f"of each class: {share}")
        yield Choice(
            "criterion.supervised_epochs", "all", "labels to the end: no run here has shown a better one"
        )


def _optimization(b: _Batch, length: Choice, epochs: float, weights: Weights | None) -> Iterator[Choice]:
    warmup = round(min(10.0, 0.05 * epochs), 2)
    if b.unlabeled >= 1024 and weights is None:
        yield Choice("optimization.optimizer", "lars", "made for batches of thousands")
        yield length
        yield Choice("optimization.lr", round(0.3 * b.unlabeled / 256, 3), "SimCLR's: 0.3 x batch / 256")
    else:
        yield Choice(
            "optimization.optimizer", "adamw", "for batches below a thousand, where LARS is slow to learn"
        )
        yield length
        why = "small: the weights are good already" if weights else "the usual one"
        yield Choice("optimization.lr", 0.0001 if weights else 0.001, why)
        yield Choice("optimization.weight_decay", 0.05, "AdamW's usual one")
        yield Choice("optimization.exclude_bias_and_norm", True, "no decay for biases and normalization")
    yield Choice("optimization.warmup", warmup, "epochs: a twentieth of the run, at most 10")


def _evaluation(s: Survey, cards: int, validation: str | float | None, epochs: float) -> Iterator[Choice]:
    every = max(1, round(epochs / 10))
    if validation is not None:
        yield Choice("evaluation.knn_every_epochs", every, "the accuracy ten times in the run")
    yield Choice("checkpoint.every_epochs", every, "at most this much is lost; Ctrl-C saves too")
    if s.labels:
        batch = max(cards, _below(min(labels_left(s), 64 * cards), cards))
        updates = max(1, labels_left(s) // batch)
        epochs = max(10, math.ceil(300 / updates))
        yield Choice("finetune.batch_size", batch, "at most as many as there are labels")
        yield Choice("finetune.epochs", epochs, f"about {epochs * updates:,} updates")


def _contrast_batch(s: Survey, m: Machine, cards: int, gpu: bool, name: str, stem: str, size: int) -> _Batch:
    """Return the batch of SimCLR with labels: what fits, at most an eighth of the images."""
    estimate = partial(memory_estimate, name, stem, size, *HEAD, precision="bf16" if gpu else "fp32")
    one, two = (estimate(views=views).total for views in (1, 2))
    views = (0.6 * m.memory - one) / (two - one) * cards
    most = (2048 if s.images >= MANY_IMAGES else 512) if gpu else 128
    share = (1 - LABELED) if s.labels else 1.0
    unlabeled = min(most, s.images // 8, int(views * share / 2))
    power_of_two = (1 << (unlabeled // cards).bit_length()) >> 1
    unlabeled = max(cards, 2, power_of_two * cards)
    if not s.labels:
        return _Batch(unlabeled)
    labeled = round(2 * unlabeled * LABELED / (1 - LABELED))
    classes = min(s.classes, max(2, labeled // 2 // cards), 32 if unlabeled < 1024 else 128)
    per_class = min(labeled // classes, max(2, s.labels // s.classes))
    return _Batch(unlabeled, classes, max(2 if cards == 1 else cards, _below(per_class, cards)))


def _labeled_batch(s: Survey, cards: int, gpu: bool) -> _Batch:
    """Return a batch of labeled images, at most half of them and of as many classes as fit."""
    left = labels_left(s)
    wanted = max(2 * cards, min((256 if gpu else 64) * cards, left // 2))
    classes = min(s.classes, wanted // cards)
    per_class = max(cards, _below(min(wanted // classes, max(1, left // s.classes)), cards))
    return _Batch(0, classes, per_class)


def labels_left(s: Survey) -> int:
    """Return the labels that are not held out."""
    return s.labels if s.validation or s.labels < max(HOLD_OUT_FROM, 5 * s.classes) else s.labels * 4 // 5


def _below(number: int, divisor: int) -> int:
    return number // divisor * divisor
