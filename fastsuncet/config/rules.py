"""What settings mean together: the rules that a single key cannot break.

A rule is checked only where all settings it reads are valid, so that a typing error does not cause a second message
about the default in its place.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from fastsuncet.config.problems import Problem, words
from fastsuncet.config.reader import as_yaml
from fastsuncet.config.schema import CONFIG, DEFAULTS
from pipelines.sampling.augmentation import Augmentation, SettingsConflict

# Values by dotted key, in the types of JSON, without those that are not valid.
Values = Mapping[str, Any]

CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}
FILES, CIFAR = ("image_folder", "images", "csv"), ("cifar10", "cifar100")
ROOT = "it is the folder that holds the images"

# Keys, the key that decides whether they are read, its values with which they are. Another value than the default has
# no effect otherwise.
READ_ONLY_WITH = [
    (["data.root"], "data.kind", (*FILES, *CIFAR)),
    (["data.index", "data.pack", "data.max_megapixels", "data.changed_images"], "data.kind", FILES),
    (["data.hw_decoder_share", "data.decoder_buffers"], "data.kind", FILES),
    ([key for key in CONFIG.values if key.startswith("data.synthetic.")], "data.kind", ("synthetic",)),
    (["data.csv"], "data.kind", ("csv",)),
    (["data.download"], "data.kind", CIFAR),
    (
        ["data.hw_decoder_share", "data.decoder_buffers", "data.color_operator"],
        "data.backend",
        ("auto", "dali"),
    ),
    (["data.split.file"], "data.split.kind", ("names", "csv")),
    (["data.split.sha256"], "data.split.kind", ("names",)),
    (["data.split.fraction", "data.split.seed"], "data.split.kind", ("bernoulli",)),
    (["criterion.plateau_epochs", "criterion.plateau_gain"], "criterion.supervised_epochs", ("plateau",)),
    (["criterion.labeled_share"], "criterion.instance", ("nt_xent",)),
    ([key for key in CONFIG.values if key.startswith("swav.")], "criterion.instance", ("swav",)),
]

# A key that must be written, the key that decides it, its values with which it must, and what to write.
NEEDED_WITH = [
    ("data.root", "data.kind", CIFAR, ROOT),
    ("data.csv", "data.kind", ("csv",), "it is a file of lines file,label"),
    ("data.split.file", "data.split.kind", ("names",), "it is a text file of one image name a line"),
    ("data.split.fraction", "data.split.kind", ("bernoulli",), "0.1 labels about 10 %% of the images"),
]


def _least(v: Values) -> int:
    """Return how many classes a labeled batch needs, and how many images of each."""
    if v["criterion.supervised_epochs"] == 0:
        return 0
    return 1 if v["criterion.supervision"] == "cross_entropy" else 2


# Whether it is broken, the key to change, and what to say: formatted with the values.
Rule = tuple[Callable[[Values], bool], str, str]
RULES: list[Rule] = [
    *(
        (
            lambda v, key=key, decider=decider, allowed=allowed: (
                v[key] != DEFAULTS[key] and v[decider] not in allowed
            ),
            key,
            f"is read only with {decider}: {words(allowed)}, and that is %({decider})s; remove it or set it to "
            f"{as_yaml(DEFAULTS[key])}",
        )
        for keys, decider, allowed in READ_ONLY_WITH
        for key in keys
    ),
    *(
        (
            lambda v, key=key, decider=decider, those=those: v[decider] in those and v[key] is None,
            key,
            f"is needed with {decider}: %({decider})s; {meaning}",
        )
        for key, decider, those, meaning in NEEDED_WITH
    ),
    # ---- data
    (
        # "train" was the default of older versions, whose configs can be read.
        lambda v: v["data.kind"] not in FILES and v["data.train"] not in (None, "train"),
        "data.train",
        f"is read only with data.kind: {words(FILES)}, and that is %(data.kind)s; remove it or set it to null",
    ),
    (
        lambda v: v["data.kind"] in FILES and v["data.root"] is None and v["data.pack"] is None,
        "data.root",
        f"is needed with data.kind: %(data.kind)s; {ROOT}. Or set data.pack to tar shards",
    ),
    *(
        (
            lambda v, key=key: v["data.kind"] == "images" and v[key] != DEFAULTS[key],
            key,
            f"must be {as_yaml(DEFAULTS[key])} with data.kind: images, which reads no labels; use csv with a file of "
            "labels in data.csv, or image_folder",
        )
        for key in ("criterion.supervised_epochs", "data.split.kind", "evaluation.knn_every_epochs")
    ),
    (
        lambda v: v["data.split.kind"] == "names" and v["data.kind"] not in FILES,
        "data.split.kind",
        "names needs images that are files, and data.kind %(data.kind)s holds them in memory; use bernoulli or all",
    ),
    (
        lambda v: v["data.split.kind"] == "csv" and v["data.split.file"] is None and v["data.kind"] != "csv",
        "data.split.file",
        "is needed with data.split.kind: csv, unless data.kind is csv too; a file of lines file,label",
    ),
    (
        lambda v: v["data.split.kind"] == "none" and v["criterion.supervised_epochs"] != 0,
        "data.split.kind",
        "none leaves no labeled image, and criterion.supervised_epochs is %(criterion.supervised_epochs)s; choose "
        "names, bernoulli, all or csv, or write supervised_epochs: 0 for SimCLR",
    ),
    (
        lambda v: v["evaluation.knn_every_epochs"] is not None and v["data.validation"] is None,
        "evaluation.knn_every_epochs",
        "needs data.validation, the folder of images to classify; null turns it off",
    ),
    (
        lambda v: v["model.init_sha256"] is not None and v["model.init"] is None,
        "model.init_sha256",
        "is read only with model.init, the file that it is of; remove it or write model.init",
    ),
    *(
        (
            lambda v, key=key: v["model.name"].startswith("timm/") and v[key] != DEFAULTS[key],
            key,
            f"must be {as_yaml(DEFAULTS[key])} with model.name: %(model.name)s, which is built as timm builds it",
        )
        for key in ("model.library", "model.stem", "model.fused_batchnorm")
    ),
    # ---- batches
    (
        lambda v: (
            v["criterion.instance"] == "swav"
            and v["swav.small_crops"] != 0
            and v["swav.small_size"] >= v["data.augmentation.size"]
        ),
        "swav.small_size",
        "is %(swav.small_size)s, and the large crops have %(data.augmentation.size)s pixels (data.augmentation.size); "
        "SwAV's sizes are 96 and 224. Make it smaller, or write swav.small_crops: 0",
    ),
    (
        lambda v: (
            (v["criterion.instance"] == "none") != (v["criterion.unsupervised_batch_size"] == 0)
            or v["criterion.unsupervised_batch_size"] == 1
        ),
        "criterion.unsupervised_batch_size",
        "must be 2 or more, or 0 with criterion.instance: none, and that is %(criterion.instance)s",
    ),
    *(
        (
            # Not for {per_rank: N}, which depends on the processes.
            lambda v, key=key, least=least: _least(v) == least and isinstance(v[key], int) and v[key] < least,
            key,
            f"must be {least} or more while supervised_epochs is %(criterion.supervised_epochs)s: "
            f"%(criterion.supervision)s {why}. For SimCLR alone write supervised_epochs: 0",
        )
        for least, why in ((1, "needs labeled images"), (2, "contrasts classes, and images of one class"))
        for key in ("criterion.classes_per_batch", "criterion.supervised_imgs_per_class")
    ),
    *(
        (
            lambda v, kind=kind, classes=classes: (
                v["data.kind"] == kind and v["criterion.classes_per_batch"] > classes
            ),
            "criterion.classes_per_batch",
            f"must be at most {classes}: {kind} has {classes} classes",
        )
        for kind, classes in CLASSES.items()
    ),
    # ---- supervision
    (
        lambda v: v["criterion.instance"] == "none" and v["criterion.supervised_epochs"] != "all",
        "criterion.supervised_epochs",
        "must be all while criterion.instance is none, not %(criterion.supervised_epochs)s: no other loss is left",
    ),
    (
        lambda v: (
            v["criterion.labeled_share"] is not None
            and v["criterion.supervised_epochs"] in (0, "all", "plateau")
        ),
        "criterion.labeled_share",
        "keeps the passes through the labeled images that supervised_epochs makes, and that is "
        "%(criterion.supervised_epochs)s; write a number of epochs there, or remove labeled_share",
    ),
    *(
        (
            lambda v, key=key: v["criterion.micro_batch"] is not None and v[key],
            "criterion.micro_batch",
            f"has not been tried with {key}: true; remove it, or set {key} to false",
        )
        for key in ("meta.compile", "meta.cuda_graph")
    ),
    # ---- model
    (
        lambda v: v["model.fused_batchnorm"] and v["meta.compile"],
        "model.fused_batchnorm",
        "has no effect with meta.compile: true, which fuses BatchNorm itself; set one of the two to false",
    ),
    (
        lambda v: v["model.fused_batchnorm"] and not v["meta.channels_last"],
        "model.fused_batchnorm",
        "has no effect with meta.channels_last: false, because its kernels read NHWC; change one of the two",
    ),
    # ---- optimization
    (
        lambda v: v["optimization.epochs"] is None and v["optimization.steps"] is None,
        "optimization.epochs",
        "is missing: how many passes over the unlabeled images (or steps: how many updates)",
    ),
    (
        lambda v: (
            v["optimization.steps"] is None
            and v["optimization.epochs"] is not None
            and v["optimization.warmup"] >= v["optimization.epochs"]
        ),
        "optimization.warmup",
        "must be shorter than the run: %(optimization.warmup)g epochs of %(optimization.epochs)s",
    ),
    *(
        (
            lambda v, key=key: v[key] > v["optimization.lr"],
            key,
            f"must not be above lr (%(optimization.lr)g): {curve}",
        )
        for key, curve in (
            ("optimization.start_lr", "the warm-up rises from start_lr to lr"),
            ("optimization.final_lr", "the cosine falls from lr to final_lr"),
        )
    ),
    (
        lambda v: v["optimization.nesterov"] and v["optimization.momentum"] == 0,
        "optimization.nesterov",
        "needs a momentum above 0",
    ),
]


def broken(v: Values) -> list[Problem]:
    """Return a problem for each broken rule between the valid settings `v`."""
    problems = []
    for is_broken, key, text in RULES:
        with suppress(KeyError):
            if is_broken(v):
                problems.append(Problem(key, text % v))
    with suppress(KeyError):
        try:
            settings = {each.name: v[f"data.augmentation.{each.name}"] for each in fields(Augmentation)}
            Augmentation(**settings)
            if v["criterion.instance"] == "swav" and v["swav.small_crops"]:
                Augmentation(**settings | {"size": v["swav.small_size"]})
        except SettingsConflict as conflict:
            problems.append(Problem(f"data.augmentation.{conflict.key}", conflict.text))
    return problems
