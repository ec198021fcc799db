"""What settings mean together: the rules that a single key cannot break.

A rule is checked only where all settings it reads are valid, so that a typing error does not cause a second message
about the default in its place.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, get_args

from fastsuncet.config.problems import Problem, words
from fastsuncet.config.reader import as_yaml
from fastsuncet.config.schema import CONFIG, DEFAULTS, TIMM, WITH_SMALL_CROPS, ContrastsLabels
from pipelines.sampling.augmentation import Augmentation, SettingsConflict

# Values by dotted key, in the types of JSON, without those that are not valid.
Values = Mapping[str, Any]
# The keys that can break it, whether one of them does, and what to say: formatted with the values and its "default".
Rule = tuple[Sequence[str], Callable[[Values, str], bool], str]

CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}
FILES, CIFAR = ("image_folder", "images", "csv"), ("cifar10", "cifar100")
ROOT = "it is the folder that holds the images"


def changed(v: Values, key: str) -> bool:
    """Return whether a key has another value than its default."""
    return v[key] != DEFAULTS[key]


# The key that decides whether others are read, its values with which they are, and these keys or sections. Another
# value than the default has no effect otherwise.
READ_ONLY_WITH = [
    ("data.kind", (*FILES, *CIFAR), "data.root"),
    ("data.kind", FILES, "data.train data.index data.pack data.max_megapixels data.changed_images"),
    ("data.kind", FILES, "data.hw_decoder_share"),
    ("data.kind", ("synthetic",), "data.synthetic"),
    ("data.kind", ("csv",), "data.csv"),
    ("data.kind", CIFAR, "data.download"),
    ("data.backend", ("auto", "dali"), "data.hw_decoder_share data.view_operator"),
    ("data.split.kind", ("names", "csv"), "data.split.file"),
    ("data.split.kind", ("names",), "data.split.sha256"),
    ("data.split.kind", ("bernoulli",), "data.split.fraction"),
    ("data.split.kind", ("stratified",), "data.split.images"),
    ("data.split.kind", ("bernoulli", "stratified"), "data.split.seed"),
    ("criterion.supervised_epochs", ("plateau",), "criterion.plateau_epochs criterion.plateau_gain"),
    ("criterion.instance", ("nt_xent",), "criterion.labeled_share"),
    ("criterion.instance", ("swav",), "swav.prototypes swav.epsilon swav.iterations swav.freeze_steps"),
    ("criterion.instance", WITH_SMALL_CROPS, "swav.small_crops swav.small_size swav.small_scale"),
    ("criterion.instance", ("paws",), "paws model.prediction_head"),
    ("optimization.optimizer", ("lars",), "optimization.trust_coefficient optimization.lr_in_momentum"),
    ("optimization.optimizer", ("lars", "sgd"), "optimization.nesterov"),
]

# A key that must be written, the key that decides it, its values with which it must, and what to write.
NEEDED_WITH = [
    ("data.root", "data.kind", CIFAR, ROOT),
    ("data.csv", "data.kind", ("csv",), "it is a file of lines file,label"),
    ("data.split.file", "data.split.kind", ("names",), "it is a text file of one image name a line"),
    ("data.split.fraction", "data.split.kind", ("bernoulli",), "0.1 labels about 10 %% of the images"),
    ("data.split.images", "data.split.kind", ("stratified",), "it is the number of labeled images"),
]


def _least(v: Values) -> int:
    """Return how many classes a labeled batch needs, and how many images of each."""
    if v["criterion.supervised_epochs"] == 0:
        return 0
    return 2 if v["criterion.supervision"] in get_args(ContrastsLabels) else 1


RULES: list[Rule] = [
    *(
        (
            [
                key
                for key in CONFIG.values
                if f"{key}.".startswith(tuple(f"{each}." for each in names.split()))
            ],
            lambda v, key, decider=decider, those=those: changed(v, key) and v[decider] not in those,
            f"is read only with {decider}: {words(those)}, and that is %({decider})s; remove it or set it to "
            "%(default)s",
        )
        for decider, those, names in READ_ONLY_WITH
    ),
    *(
        (
            [key],
            lambda v, key, decider=decider, those=those: v[decider] in those and v[key] is None,
            f"is needed with {decider}: %({decider})s; {meaning}",
        )
        for key, decider, those, meaning in NEEDED_WITH
    ),
    # ---- data
    (
        ["data.root"],
        lambda v, key: v["data.kind"] in FILES and v[key] is None and v["data.pack"] is None,
        f"is needed with data.kind: %(data.kind)s; {ROOT}. Or set data.pack to tar shards",
    ),
    (
        ["criterion.supervised_epochs", "data.split.kind", "evaluation.knn_every_epochs"],
        lambda v, key: v["data.kind"] == "images" and changed(v, key),
        "must be %(default)s with data.kind: images, which reads no labels; use csv with a file of labels in data.csv, "
        "or image_folder",
    ),
    (
        ["data.split.kind"],
        lambda v, key: v[key] == "names" and v["data.kind"] not in FILES,
        "names needs images that are files, and data.kind %(data.kind)s holds them in memory; use bernoulli, "
        "stratified or all",
    ),
    (
        ["data.split.file"],
        lambda v, key: v["data.split.kind"] == "csv" and v[key] is None and v["data.kind"] != "csv",
        "is needed with data.split.kind: csv, unless data.kind is csv too; a file of lines file,label",
    ),
    (
        ["data.split.kind"],
        lambda v, key: v[key] == "none" and v["criterion.supervised_epochs"] != 0,
        "none leaves no labeled image, and criterion.supervised_epochs is %(criterion.supervised_epochs)s; choose "
        "names, bernoulli, stratified, all or csv, or write supervised_epochs: 0 for SimCLR",
    ),
    (
        ["evaluation.knn_every_epochs"],
        lambda v, key: v[key] is not None and v["data.validation"] is None,
        "needs data.validation, the images to classify; null turns it off",
    ),
    (
        ["model.init_sha256", "model.init_heads"],
        lambda v, key: changed(v, key) and v["model.init"] is None,
        "is read only with model.init, the file that it is of; remove it or write model.init",
    ),
    (
        ["model.stem"],
        lambda v, key: v["model.name"].startswith(TIMM) and changed(v, key),
        "must be %(default)s with model.name: %(model.name)s, which is built as timm builds it",
    ),
    (
        ["model.stem"],
        lambda v, key: v["model.name"] == "wide_resnet28w2" and v[key] != "cifar",
        "must be cifar with model.name: wide_resnet28w2, which is for small images",
    ),
    # ---- batches
    (
        ["swav.small_size"],
        lambda v, key: (
            v["criterion.instance"] in WITH_SMALL_CROPS
            and v["swav.small_crops"] != 0
            and v[key] >= v["data.augmentation.size"]
        ),
        "is %(swav.small_size)s, and the large crops have %(data.augmentation.size)s pixels (data.augmentation.size); "
        "SwAV's sizes are 96 and 224. Make it smaller, or write swav.small_crops: 0",
    ),
    (
        ["criterion.unsupervised_batch_size"],
        lambda v, key: (v["criterion.instance"] == "none") != (v[key] == 0) or v[key] == 1,
        "must be 2 or more, or 0 with criterion.instance: none, and that is %(criterion.instance)s",
    ),
    *(
        (
            ["criterion.classes_per_batch", "criterion.supervised_imgs_per_class"],
            # Not for {per_rank: N}, which depends on the processes.
            lambda v, key, least=least: _least(v) == least and isinstance(v[key], int) and v[key] < least,
            f"must be {least} or more while supervised_epochs is %(criterion.supervised_epochs)s: "
            f"{why}. For SimCLR alone write supervised_epochs: 0",
        )
        for least, why in (
            (1, "%(criterion.instance)s with supervision %(criterion.supervision)s needs labeled images"),
            (2, "%(criterion.supervision)s contrasts classes, and images of one class"),
        )
    ),
    *(
        (
            ["criterion.classes_per_batch"],
            lambda v, key, kind=kind, classes=classes: v["data.kind"] == kind and v[key] > classes,
            f"must be at most {classes}: {kind} has {classes} classes",
        )
        for kind, classes in CLASSES.items()
    ),
    # ---- supervision
    (
        ["criterion.supervised_epochs"],
        lambda v, key: v["criterion.instance"] in ("none", "paws") and v[key] != "all",
        "must be all while criterion.instance is %(criterion.instance)s, not %(criterion.supervised_epochs)s: without "
        "labeled images no loss is left",
    ),
    (
        ["criterion.supervision"],
        lambda v, key: v[key] == "none" and v["criterion.instance"] != "paws",
        "none is only with criterion.instance: paws, and that is %(criterion.instance)s; for no supervision write "
        "supervised_epochs: 0",
    ),
    (
        ["criterion.labeled_share"],
        lambda v, key: v[key] is not None and v["criterion.supervised_epochs"] in (0, "all", "plateau"),
        "keeps the passes through the labeled images that supervised_epochs makes, and that is "
        "%(criterion.supervised_epochs)s; write a number of epochs there, or remove labeled_share",
    ),
    *(
        (
            ["criterion.micro_batch"],
            lambda v, key, other=other: v[key] is not None and v[other] is True,
            f"has not been tried with {other}: true; remove it, or set {other} to false",
        )
        for other in ("meta.compile", "meta.cuda_graph")
    ),
    # ---- model
    (
        ["model.fused_batchnorm"],
        lambda v, key: v[key] is True and v["model.name"].startswith(TIMM),
        "must be auto or false with model.name: %(model.name)s, which is built as timm builds it",
    ),
    (
        ["model.fused_batchnorm"],
        lambda v, key: v[key] is True and v["meta.compile"],
        "has no effect with meta.compile: true, which fuses BatchNorm itself; set one of the two to false",
    ),
    (
        ["model.fused_batchnorm"],
        lambda v, key: v[key] is True and not v["meta.channels_last"],
        "has no effect with meta.channels_last: false, because its kernels read NHWC; change one of the two",
    ),
    # ---- optimization
    (
        ["optimization.epochs"],
        lambda v, key: v[key] is None and v["optimization.steps"] is None,
        "is missing: how many passes over the unlabeled images (or steps: how many updates)",
    ),
    (
        ["optimization.warmup"],
        lambda v, key: (
            v["optimization.steps"] is None
            and v["optimization.epochs"] is not None
            and v[key] >= v["optimization.epochs"]
        ),
        "must be shorter than the run: %(optimization.warmup)g epochs of %(optimization.epochs)s",
    ),
    (
        ["optimization.start_lr"],
        lambda v, key: v[key] > v["optimization.lr"],
        "must not be above lr (%(optimization.lr)g): the warm-up rises from start_lr to lr",
    ),
    (
        ["optimization.final_lr"],
        lambda v, key: v[key] > v["optimization.lr"],
        "must not be above lr (%(optimization.lr)g): the cosine falls from lr to final_lr",
    ),
    (
        ["optimization.nesterov"],
        lambda v, key: v[key] and v["optimization.momentum"] == 0,
        "needs a momentum above 0",
    ),
]


def broken(v: Values) -> list[Problem]:
    """Return a problem for each broken rule between the valid settings `v`."""
    problems = []
    for keys, is_broken, text in RULES:
        for key in keys:
            with suppress(KeyError):
                if is_broken(v, key):
                    problems.append(Problem(key, text % {**v, "default": as_yaml(DEFAULTS.get(key))}))
    with suppress(KeyError):
        try:
            settings = {each.name: v[f"data.augmentation.{each.name}"] for each in fields(Augmentation)}
            Augmentation(**settings)
            if v["criterion.instance"] in WITH_SMALL_CROPS and v["swav.small_crops"]:
                Augmentation(**settings | {"size": v["swav.small_size"]})
        except SettingsConflict as conflict:
            problems.append(Problem(f"data.augmentation.{conflict.key}", conflict.text))
    return problems
