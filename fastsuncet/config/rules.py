"""What settings mean together: the rules that a single key cannot break.

A rule is checked only where all settings it reads are valid, so that a typing error does not cause a second message
about the default in its place.
"""

from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from fastsuncet.config.messages import Problem, as_yaml, words
from fastsuncet.config.schema import SECTIONS, VALUES, Section, Sections
from pipelines.sampling.augmentation import Augmentation, SettingsConflict

CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}
FILES = ("image_folder", "images", "csv")  # the kinds whose images are files or tar shards
ROOT = "it is the folder that holds the images"
LABELS_ALONE = "learn from labels alone with instance: none"
SIMCLR = "For SimCLR alone write supervised_epochs: 0"


class _Invalid(Exception):
    """A rule reads a setting that is not valid."""


class Settings:
    """The settings of a config by attribute. Reading one that is not valid ends the rule."""

    def __init__(self, section: Sections | Section, invalid: Set[str], name: str = ""):
        self._section, self._invalid, self._name = section, invalid, name

    def __getattr__(self, name: str) -> Any:
        key = f"{self._name}.{name}".lstrip(".")
        if key in self._invalid:
            raise _Invalid
        if key in SECTIONS:
            return Settings(getattr(self._section, name), self._invalid, key)
        if key in VALUES:
            return getattr(self._section, name)
        return getattr(type(self._section), name).fget(self)  # a property, which reads settings itself


@dataclass(frozen=True)
class Rule:
    """What may not be, as a function of the settings `c`; the key to change; and what to say, formatted with `c`."""

    broken: Callable[[Any], bool]
    key: str
    text: str


def _unread(key: str, decider: str, values: tuple[str, ...]) -> Rule:
    """Return the rule that a setting which nothing reads has its default: it would have no effect."""
    default = VALUES[key].default

    def broken(c: Any) -> bool:
        return _value(c, key) != default and _value(c, decider) not in values

    text = (
        f"is read only with {decider}: {words(values)}, and that is {{c.{decider}}}; remove it or set it to "
    )
    return Rule(broken, key, text + as_yaml(default))


def _needed(key: str, decider: str, value: str, meaning: str) -> Rule:
    """Return the rule that a setting is written where another one has `value`."""
    return Rule(
        lambda c: _value(c, decider) == value and _value(c, key) is None,
        key,
        f"is needed with {decider}: {value}; {meaning}",
    )


def _value(c: Any, key: str) -> Any:
    for name in key.split("."):
        c = getattr(c, name)
    return c


def _fewer(images: Any, least: int) -> bool:
    return isinstance(images, int) and images < least  # not for {per_rank: N}, which depends on the processes


# decider, its values with which the keys are read, those keys
READ_ONLY_WITH = [
    ("data.kind", (*FILES, "cifar10", "cifar100"), ["data.root"]),
    ("data.kind", FILES, ["data.index", "data.pack"]),
    ("data.kind", FILES, ["data.hw_decoder_share", "data.decoder_buffers"]),
    ("data.kind", ("synthetic",), [key for key in VALUES if key.startswith("data.synthetic.")]),
    ("data.kind", ("csv",), ["data.csv"]),
    ("data.kind", ("cifar10", "cifar100"), ["data.download"]),
    (
        "data.backend",
        ("auto", "dali"),
        ["data.hw_decoder_share", "data.decoder_buffers", "data.color_operator"],
    ),
    ("data.augmentation.color", ("exact",), ["data.color_operator"]),
    ("data.split.kind", ("names", "csv"), ["data.split.file"]),
    ("data.split.kind", ("names",), ["data.split.sha256"]),
    ("data.split.kind", ("bernoulli",), ["data.split.fraction", "data.split.seed"]),
    ("criterion.supervised_epochs", ("plateau",), ["criterion.plateau_epochs", "criterion.plateau_gain"]),
    ("criterion.instance", ("nt_xent",), ["criterion.labeled_share"]),
    ("criterion.instance", ("swav",), [key for key in VALUES if key.startswith("swav.")]),
]

# key, decider, its value with which the key is needed, what the key is
NEEDED_WITH = [
    *(("data.root", "data.kind", kind, ROOT) for kind in ("cifar10", "cifar100")),
    ("data.csv", "data.kind", "csv", "it is a file of lines file,label"),
    ("data.split.file", "data.split.kind", "names", "it is a text file of one image name a line"),
    ("data.split.fraction", "data.split.kind", "bernoulli", "0.1 labels about 10 % of the images"),
]

RULES = [
    *(_unread(key, decider, values) for decider, values, keys in READ_ONLY_WITH for key in keys),
    *(_needed(*each) for each in NEEDED_WITH),
    # ---- data
    Rule(
        # "train" was the default of older versions, whose configs can be read.
        lambda c: c.data.kind not in FILES and c.data.train not in (None, "train"),
        "data.train",
        f"is read only with data.kind: {words(FILES)}, and that is {{c.data.kind}}; remove it or set it to null",
    ),
    Rule(
        lambda c: c.data.kind in FILES and c.data.root is None and c.data.pack is None,
        "data.root",
        f"is needed with data.kind: {{c.data.kind}}; {ROOT}. Or set data.pack to tar shards",
    ),
    Rule(
        lambda c: c.data.kind == "images" and c.criterion.supervised,
        "data.kind",
        "images reads no labels, and criterion.supervised_epochs is {c.criterion.supervised_epochs}. Use csv with a "
        f"file of labels in data.csv, or image_folder for a folder for each class. {SIMCLR}",
    ),
    Rule(
        lambda c: c.data.kind == "images" and c.data.split.kind != "none",
        "data.split.kind",
        "must be none with data.kind: images, which reads no labels",
    ),
    Rule(
        lambda c: c.data.kind == "images" and c.evaluation.knn_every_epochs is not None,
        "evaluation.knn_every_epochs",
        "needs labels, and data.kind: images reads none; null turns it off",
    ),
    Rule(
        lambda c: c.data.split.kind == "names" and c.data.kind not in FILES,
        "data.split.kind",
        "names needs images that are files, and data.kind {c.data.kind} holds them in memory; use bernoulli with a "
        "fraction, or all",
    ),
    Rule(
        lambda c: c.data.split.kind == "csv" and c.data.split.file is None and c.data.kind != "csv",
        "data.split.file",
        "is needed with data.split.kind: csv, unless data.kind is csv too; a file of lines file,label",
    ),
    Rule(
        lambda c: c.evaluation.knn_every_epochs is not None and c.data.validation is None,
        "evaluation.knn_every_epochs",
        "needs data.validation, the folder of images to classify; null turns it off",
    ),
    # ---- unlabeled images
    Rule(
        lambda c: (
            c.criterion.instance == "swav"
            and c.swav.small_crops
            and c.swav.small_size >= c.data.augmentation.size
        ),
        "swav.small_size",
        "is {c.swav.small_size}, and the large crops have {c.data.augmentation.size} pixels (data.augmentation.size); "
        "SwAV's sizes are 96 and 224. Make it smaller, or write swav.small_crops: 0",
    ),
    Rule(
        lambda c: c.criterion.instance == "swav" and c.swav.prototypes < 2,
        "swav.prototypes",
        "must be 2 or more: with one prototype all images are assigned to it and nothing is learned",
    ),
    Rule(
        lambda c: c.criterion.instance == "none" and c.criterion.unsupervised_batch_size != 0,
        "criterion.unsupervised_batch_size",
        "must be 0 while criterion.instance is none: no loss would read these images",
    ),
    Rule(
        lambda c: c.criterion.instance != "none" and _fewer(c.criterion.unsupervised_batch_size, 2),
        "criterion.unsupervised_batch_size",
        f"must be 2 or more with criterion.instance: {{c.criterion.instance}}; {LABELS_ALONE}",
    ),
    # ---- labeled images
    Rule(
        lambda c: c.criterion.instance == "none" and c.criterion.supervised_epochs != "all",
        "criterion.supervised_epochs",
        "must be all while criterion.instance is none, not {c.criterion.supervised_epochs}: no other loss is left",
    ),
    Rule(
        lambda c: (
            c.criterion.labeled_share is not None and c.criterion.supervised_epochs in (0, "all", "plateau")
        ),
        "criterion.labeled_share",
        "keeps the passes through the labeled images that supervised_epochs makes, and that is "
        "{c.criterion.supervised_epochs}; write a number of epochs there, or remove labeled_share",
    ),
    Rule(
        lambda c: c.criterion.labeled_share == 1,
        "criterion.labeled_share",
        f"must be below 1: unlabeled images need a share; {LABELS_ALONE}",
    ),
    Rule(
        lambda c: c.criterion.contrasts_labels and c.criterion.classes_per_batch < 2,
        "criterion.classes_per_batch",
        "must be 2 or more while supervised_epochs is {c.criterion.supervised_epochs}: {c.criterion.supervision} "
        f"contrasts classes. {SIMCLR}",
    ),
    Rule(
        lambda c: c.criterion.contrasts_labels and _fewer(c.criterion.supervised_imgs_per_class, 2),
        "criterion.supervised_imgs_per_class",
        "must be 2 or more while supervised_epochs is {c.criterion.supervised_epochs}: an image alone in its class has "
        f"no positive. {SIMCLR}",
    ),
    *(
        Rule(
            lambda c, name=name: (
                c.criterion.supervised
                and not c.criterion.contrasts_labels
                and _fewer(getattr(c.criterion, name), 1)
            ),
            f"criterion.{name}",
            "must be 1 or more while supervised_epochs is {c.criterion.supervised_epochs}: {c.criterion.supervision} "
            f"needs labeled images. {SIMCLR}",
        )
        for name in ("classes_per_batch", "supervised_imgs_per_class")
    ),
    *(
        Rule(
            lambda c, kind=kind, classes=classes: (
                c.data.kind == kind and c.criterion.classes_per_batch > classes
            ),
            "criterion.classes_per_batch",
            f"must be at most {classes}: {kind} has {classes} classes",
        )
        for kind, classes in CLASSES.items()
    ),
    Rule(
        lambda c: c.criterion.supervised and c.data.split.kind == "none",
        "data.split.kind",
        "none leaves no labeled image, and criterion.supervised_epochs is {c.criterion.supervised_epochs}; choose "
        "names, bernoulli, all or csv, or write supervised_epochs: 0 for SimCLR",
    ),
    # ---- optimization
    Rule(
        lambda c: c.optimization.epochs is None and c.optimization.steps is None,
        "optimization.epochs",
        "is missing: how many passes over the unlabeled images (or steps: how many updates)",
    ),
    Rule(
        lambda c: (
            c.optimization.steps is None
            and c.optimization.epochs is not None
            and c.optimization.warmup >= c.optimization.epochs
        ),
        "optimization.warmup",
        "must be shorter than the run: {c.optimization.warmup:g} epochs of {c.optimization.epochs}",
    ),
    Rule(
        lambda c: c.optimization.start_lr > c.optimization.lr,
        "optimization.start_lr",
        "must not be above lr ({c.optimization.lr:g}): the warm-up rises from start_lr to lr",
    ),
    Rule(
        lambda c: c.optimization.final_lr > c.optimization.lr,
        "optimization.final_lr",
        "must not be above lr ({c.optimization.lr:g}): the cosine falls from lr to final_lr",
    ),
    Rule(
        lambda c: c.optimization.nesterov and c.optimization.momentum == 0,
        "optimization.nesterov",
        "needs a momentum above 0",
    ),
]


def broken(config: Sections, invalid: Set[str] = frozenset()) -> list[Problem]:
    """Return a problem for each broken rule. `invalid` are the dotted keys and sections that are wrong already."""
    c: Any = Settings(config, invalid)
    problems = []
    for rule in RULES:
        with suppress(_Invalid):
            if rule.broken(c):
                problems.append(Problem(rule.key, rule.text.format(c=c)))
    with suppress(_Invalid):
        try:
            settings = {each.name: getattr(c.data.augmentation, each.name) for each in fields(Augmentation)}
            Augmentation(**settings)
            if c.criterion.instance == "swav" and c.swav.small_crops:
                Augmentation(**settings | {"size": c.swav.small_size})
        except SettingsConflict as conflict:
            problems.append(Problem(f"data.augmentation.{conflict.key}", conflict.text))
    return problems
