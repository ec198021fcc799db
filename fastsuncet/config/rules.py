"""What settings mean together: the rules no single key can break.

A rule names the keys it reads and yields (key to change, what to do) for each break. It is asked only where
all of its keys are valid by themselves, so a typo never sets off a second message about the default in its
place.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from fastsuncet.config.problems import words
from fastsuncet.config.schema import Sections
from fastsuncet.config.types import PerRank

Breaks = Iterator[tuple[str, str]]
RULES: list[tuple[tuple[str, ...], Callable[[Sections], Breaks]]] = []
CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}


def rule(*keys: str) -> Callable:
    """Registers a rule that reads `keys`."""

    def register(function: Callable[[Sections], Breaks]) -> Callable[[Sections], Breaks]:
        RULES.append((keys, function))
        return function

    return register


def broken(config: Sections, invalid: set[str] = frozenset()) -> Breaks:
    """Every broken rule. `invalid` are the dotted keys or sections that are wrong already."""
    for keys, function in RULES:
        if not any(key == bad or key.startswith(bad + ".") for key in keys for bad in invalid):
            yield from function(config)


def read(config: Sections, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


# key -> its neutral value, the key that decides whether it is read, and the values with which it is.
# A setting that nothing reads is refused: it is a wish that would not come true.
READ_ONLY_WITH = {
    "data.root": (None, "data.kind", ("image_folder", "csv", "cifar10", "cifar100")),
    "data.train": ("train", "data.kind", ("image_folder", "csv")),
    "data.csv": (None, "data.kind", ("csv",)),
    "data.download": (False, "data.kind", ("cifar10", "cifar100")),
    "data.index": (None, "data.kind", ("image_folder", "csv")),
    "data.split.file": (None, "data.split.kind", ("names", "csv")),
    "data.split.sha256": (None, "data.split.kind", ("names",)),
    "data.split.fraction": (None, "data.split.kind", ("bernoulli",)),
    "data.split.seed": (0, "data.split.kind", ("bernoulli",)),
}


def _register_unread(key: str, neutral: object, decider: str, kinds: tuple[str, ...]) -> None:
    @rule(key, decider)
    def unread(config: Sections) -> Breaks:
        if read(config, key) != neutral and read(config, decider) not in kinds:
            away = "null" if neutral is None else str(neutral).lower()
            yield (
                key,
                f"is read only with {decider}: {words(kinds)}, and that is {read(config, decider)}; "
                f"remove it or set it to {away}",
            )


for _key, (_neutral, _decider, _kinds) in READ_ONLY_WITH.items():
    _register_unread(_key, _neutral, _decider, _kinds)


@rule("data.kind", "data.root")
def images_have_a_place(config: Sections) -> Breaks:
    data = config.data
    if data.kind != "digits" and data.root is None:
        yield "data.root", f"is needed with data.kind: {data.kind}; it is the folder that holds the images"


@rule("data.kind", "data.csv")
def a_csv_data_set_has_its_csv(config: Sections) -> Breaks:
    if config.data.kind == "csv" and config.data.csv is None:
        yield "data.csv", "is needed with data.kind: csv; it is a file of lines file,label"


@rule("data.split.kind", "data.split.file", "data.kind")
def a_name_list_has_a_file_and_names_files(config: Sections) -> Breaks:
    if config.data.split.kind != "names":
        return
    if config.data.split.file is None:
        yield (
            "data.split.file",
            "is needed with data.split.kind: names; it is a text file of one image name a line",
        )
    if config.data.kind in CLASSES:
        yield (
            "data.split.kind",
            f"names needs images that are files, and data.kind {config.data.kind} holds them in memory; "
            "use bernoulli with a fraction, or all",
        )


@rule("data.split.kind", "data.split.fraction")
def a_drawn_split_has_its_fraction(config: Sections) -> Breaks:
    if config.data.split.kind == "bernoulli" and config.data.split.fraction is None:
        yield (
            "data.split.fraction",
            "is needed with data.split.kind: bernoulli; 0.1 labels about 10 % of the images",
        )


@rule("data.split.kind", "data.split.file", "data.kind")
def a_csv_split_has_a_csv(config: Sections) -> Breaks:
    split = config.data.split
    if split.kind == "csv" and split.file is None and config.data.kind != "csv":
        yield (
            "data.split.file",
            "is needed with data.split.kind: csv, unless data.kind is csv too; a file of lines file,label",
        )


@rule(
    "data.augmentation.blur",
    "data.augmentation.blur_sigma",
    "data.augmentation.blur_window",
    "data.augmentation.size",
)
def the_blur_fits_the_view(config: Sections) -> Breaks:
    """The border is mirrored once; a kernel that reaches past the mirror has no meaning."""
    a = config.data.augmentation
    automatic = a.blur_window == "auto"
    window = 2 * math.ceil(3 * a.blur_sigma[1]) + 1 if automatic else a.blur_window
    if a.blur > 0 and window // 2 >= a.size:
        yield (
            "data.augmentation." + ("blur_sigma" if automatic else "blur_window"),
            f"asks for a blur {window} pixels wide, which does not fit a view of {a.size} pixels; "
            "make it smaller, or turn it off with blur: 0",
        )


@rule("criterion.supervised_epochs", "criterion.classes_per_batch", "data.kind")
def supervision_contrasts_classes(config: Sections) -> Breaks:
    c = config.criterion
    if c.supervised and c.classes_per_batch < 2:
        yield (
            "criterion.classes_per_batch",
            f"must be 2 or more while supervised_epochs is {c.supervised_epochs}: SuNCEt contrasts classes. "
            "For SimCLR alone write supervised_epochs: 0",
        )
    known = CLASSES.get(config.data.kind)
    if known and c.classes_per_batch > known:
        yield (
            "criterion.classes_per_batch",
            f"must be at most {known}: {config.data.kind} has {known} classes",
        )


@rule("criterion.supervised_epochs", "criterion.supervised_imgs_per_class")
def supervision_has_positives(config: Sections) -> Breaks:
    c = config.criterion
    images = c.supervised_imgs_per_class
    if c.supervised and not isinstance(images, PerRank) and images < 2:
        yield (
            "criterion.supervised_imgs_per_class",
            f"must be 2 or more while supervised_epochs is {c.supervised_epochs}: an image alone in its "
            "class has no positive. For SimCLR alone write supervised_epochs: 0",
        )


@rule("criterion.supervised_epochs", "data.split.kind")
def supervision_has_labels(config: Sections) -> Breaks:
    epochs = config.criterion.supervised_epochs
    if config.criterion.supervised and config.data.split.kind == "none":
        yield (
            "data.split.kind",
            f"none leaves no labeled image, and criterion.supervised_epochs is {epochs}; choose names, "
            "bernoulli, all or csv, or write supervised_epochs: 0 for SimCLR",
        )


@rule("optimization.epochs", "optimization.steps")
def a_run_ends(config: Sections) -> Breaks:
    if config.optimization.epochs is None and config.optimization.steps is None:
        yield (
            "optimization.epochs",
            "is missing: how many passes over the unlabeled images (or steps: how many updates)",
        )


@rule("optimization.epochs", "optimization.steps", "optimization.warmup")
def the_warmup_ends_before_the_run(config: Sections) -> Breaks:
    o = config.optimization
    if o.steps is None and o.epochs is not None and o.warmup >= o.epochs:
        yield "optimization.warmup", f"must be shorter than the run: {o.warmup:g} epochs of {o.epochs}"


@rule("optimization.start_lr", "optimization.lr")
def the_warmup_rises(config: Sections) -> Breaks:
    o = config.optimization
    if o.start_lr > o.lr:
        yield (
            "optimization.start_lr",
            f"must not be above lr ({o.lr:g}): the warm-up rises from start_lr to lr",
        )


@rule("optimization.final_lr", "optimization.lr")
def the_cosine_falls(config: Sections) -> Breaks:
    o = config.optimization
    if o.final_lr > o.lr:
        yield (
            "optimization.final_lr",
            f"must not be above lr ({o.lr:g}): the cosine falls from lr to final_lr",
        )


@rule("optimization.nesterov", "optimization.momentum")
def nesterov_looks_ahead_along_a_momentum(config: Sections) -> Breaks:
    if config.optimization.nesterov and config.optimization.momentum == 0:
        yield "optimization.nesterov", "needs a momentum above 0"


@rule("evaluation.knn_every_epochs", "data.validation")
def an_evaluation_has_images(config: Sections) -> Breaks:
    if config.evaluation.knn_every_epochs is not None and config.data.validation is None:
        yield (
            "evaluation.knn_every_epochs",
            "needs data.validation, the folder of images to classify; null turns it off",
        )
