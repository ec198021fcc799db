"""What settings mean together: the rules no single key can break.

A rule names the keys it reads and yields (key to change, what to do) for each break. It is asked only where
all of its keys are valid by themselves, so a typo never sets off a second message about the default in its
place.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from fastsuncet.config.problems import words
from fastsuncet.config.schema import Sections
from fastsuncet.config.types import PerRank
from pipelines.sampling.augmentation import Augmentation, SettingsConflict

Breaks = Iterator[tuple[str, str]]
RULES: list[tuple[tuple[str, ...], Callable[[Sections], Breaks]]] = []
NAMES = {"suncet": "SuNCEt", "cross_entropy": "cross-entropy", "sup_con": "L_sup_out"}
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
    "data.pack": (None, "data.kind", ("image_folder", "csv")),
    "data.hw_decoder_share": (0.0, "data.kind", ("image_folder", "csv")),
    "data.decoder_buffers": ("grown", "data.kind", ("image_folder", "csv")),
    "data.color_operator": ("auto", "data.augmentation.color", ("exact",)),
    "data.split.file": (None, "data.split.kind", ("names", "csv")),
    "data.split.sha256": (None, "data.split.kind", ("names",)),
    "data.split.fraction": (None, "data.split.kind", ("bernoulli",)),
    "data.split.seed": (0, "data.split.kind", ("bernoulli",)),
    "criterion.plateau_epochs": (10, "criterion.supervised_epochs", ("plateau",)),
    "criterion.plateau_gain": (0.01, "criterion.supervised_epochs", ("plateau",)),
    "swav.prototypes": (3000, "criterion.instance", ("swav",)),
    "swav.epsilon": (0.05, "criterion.instance", ("swav",)),
    "swav.iterations": (3, "criterion.instance", ("swav",)),
    "swav.freeze_steps": (313, "criterion.instance", ("swav",)),
    "swav.small_crops": (6, "criterion.instance", ("swav",)),
    "swav.small_size": (96, "criterion.instance", ("swav",)),
    "swav.small_scale": ((0.05, 0.14), "criterion.instance", ("swav",)),
}


def written(value: object) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _register_unread(key: str, neutral: object, decider: str, kinds: tuple[str, ...]) -> None:
    @rule(key, decider)
    def unread(config: Sections) -> Breaks:
        if read(config, key) != neutral and read(config, decider) not in kinds:
            away = "null" if neutral is None else str(neutral).lower()
            yield (
                key,
                f"is read only with {decider}: {words(map(written, kinds))}, and that is "
                f"{written(read(config, decider))}; "
                f"remove it or set it to {away}",
            )


for _key, (_neutral, _decider, _kinds) in READ_ONLY_WITH.items():
    _register_unread(_key, _neutral, _decider, _kinds)
for _key in ("data.hw_decoder_share", "data.decoder_buffers", "data.color_operator"):
    _register_unread(_key, READ_ONLY_WITH[_key][0], "data.backend", ("auto", "dali"))


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
    *(f"data.augmentation.{each.name}" for each in fields(Augmentation)),
    "criterion.instance",
    "swav.small_size",
    "swav.small_crops",
)
def views_can_be_drawn(config: Sections) -> Breaks:
    a = config.data.augmentation
    settings = {each.name: getattr(a, each.name) for each in fields(Augmentation)}
    if config.criterion.instance == "swav" and config.swav.small_crops:
        settings["size"] = min(a.size, config.swav.small_size)
    try:
        Augmentation(**settings)
    except SettingsConflict as conflict:
        yield f"data.augmentation.{conflict.key}", conflict.text


@rule("criterion.instance", "swav.small_crops", "swav.small_size", "data.augmentation.size")
def small_crops_are_small(config: Sections) -> Breaks:
    small, size = config.swav, config.data.augmentation.size
    if config.criterion.instance == "swav" and small.small_crops and small.small_size >= size:
        yield (
            "swav.small_size",
            f"is {small.small_size}, and the large crops have {size} pixels (data.augmentation.size); SwAV's are 96 "
            "beside 224. Make it smaller, or write swav.small_crops: 0",
        )


@rule("criterion.instance", "swav.prototypes")
def prototypes_can_be_told_apart(config: Sections) -> Breaks:
    if config.criterion.instance == "swav" and config.swav.prototypes < 2:
        yield (
            "swav.prototypes",
            "must be 2 or more: every image belongs to a single one, and nothing is learned",
        )


@rule("criterion.instance", "criterion.unsupervised_batch_size")
def unlabeled_images_have_a_loss(config: Sections) -> Breaks:
    size, instance = config.criterion.unsupervised_batch_size, config.criterion.instance
    if instance == "none" and size != 0:
        yield (
            "criterion.unsupervised_batch_size",
            "must be 0 while criterion.instance is none: no loss would read these images",
        )
    if instance != "none" and not isinstance(size, PerRank) and size < 2:
        yield (
            "criterion.unsupervised_batch_size",
            f"must be 2 or more with criterion.instance: {instance}; labels alone are learned from with "
            "instance: none",
        )


@rule("criterion.instance", "criterion.supervised_epochs")
def something_is_learned_from(config: Sections) -> Breaks:
    c = config.criterion
    if c.instance == "none" and c.supervised_epochs != "all":
        yield (
            "criterion.supervised_epochs",
            f"must be all while criterion.instance is none, not {c.supervised_epochs}: the labels are all there is to "
            "learn from",
        )


@rule("criterion.labeled_share", "criterion.supervised_epochs", "criterion.instance")
def a_labeled_share_has_passes_to_keep(config: Sections) -> Breaks:
    c = config.criterion
    if c.labeled_share is None:
        return
    if c.supervised_epochs in (0, "all", "plateau"):
        yield (
            "criterion.labeled_share",
            "keeps the passes through the labeled images that supervised_epochs makes, and that is "
            f"{c.supervised_epochs}; write a number of epochs there, or remove labeled_share",
        )
    if c.instance != "nt_xent":
        yield (
            "criterion.labeled_share",
            f"is read only with criterion.instance: nt_xent, and that is {c.instance}; remove it or set it to null",
        )
    if c.labeled_share == 1:
        yield (
            "criterion.labeled_share",
            "must be below 1: unlabeled images need a share; labels alone are learned from with instance: none",
        )


@rule("criterion.supervised_epochs", "criterion.classes_per_batch", "criterion.supervision", "data.kind")
def supervision_contrasts_classes(config: Sections) -> Breaks:
    c = config.criterion
    least = 2 if c.contrasts_labels else 1
    if c.supervised and c.classes_per_batch < least:
        why = f"{NAMES[c.supervision]} contrasts classes" if least == 2 else "it takes labeled images"
        yield (
            "criterion.classes_per_batch",
            f"must be {least} or more while supervised_epochs is {c.supervised_epochs}: {why}. "
            "For SimCLR alone write supervised_epochs: 0",
        )
    known = CLASSES.get(config.data.kind)
    if known and c.classes_per_batch > known:
        yield (
            "criterion.classes_per_batch",
            f"must be at most {known}: {config.data.kind} has {known} classes",
        )


@rule("criterion.supervised_epochs", "criterion.supervised_imgs_per_class", "criterion.supervision")
def supervision_has_positives(config: Sections) -> Breaks:
    c = config.criterion
    images = c.supervised_imgs_per_class
    least = 2 if c.contrasts_labels else 1
    if c.supervised and not isinstance(images, PerRank) and images < least:
        why = "an image alone in its class has no positive" if least == 2 else "it takes labeled images"
        yield (
            "criterion.supervised_imgs_per_class",
            f"must be {least} or more while supervised_epochs is {c.supervised_epochs}: {why}. "
            "For SimCLR alone write supervised_epochs: 0",
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
