"""What settings mean together: the rules that a single key cannot break."""

from fastsuncet.config.problems import Problem, words
from fastsuncet.config.reader import as_yaml
from fastsuncet.config.schema import CONFIG, DEFAULTS, TIMM, WITH_SMALL_CROPS, Sections, flat
from pipelines.sampling.augmentation import Augmentation, SettingsConflict

FILES, CIFAR = ("image_folder", "images", "csv"), ("cifar10", "cifar100")

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


def broken(config: Sections) -> list[Problem]:
    """Return a problem for each rule that `config` breaks.

    The text of each names the other keys that it depends on: where one of these is wrong itself, the problem is about
    the default in its place and is not reported.
    """
    problems, values = list[Problem](), flat(config.model_dump(mode="json"))

    def wrong(key: str, text: str) -> None:
        problems.append(Problem(key, text))

    for decider, those, names in READ_ONLY_WITH:
        only, now, below = words(those), values[decider], tuple(f"{name}." for name in names.split())
        for key in CONFIG.values if now not in those else ():
            if f"{key}.".startswith(below) and values[key] != DEFAULTS[key]:
                default = as_yaml(DEFAULTS[key])
                text = f"is read only with {decider}: {only}, and that is {now}; remove it or set it to {default}"
                wrong(key, text)

    # ---- data
    d, split, model, meta = config.data, config.data.split, config.model, config.meta
    if d.root is None and (d.kind in CIFAR or (d.kind in FILES and d.pack is None)):
        text = f"is needed with data.kind: {d.kind}; it is the folder that holds the images"
        wrong("data.root", text + (". Or set data.pack to tar shards" if d.kind in FILES else ""))
    if d.kind == "csv" and d.csv is None:
        wrong("data.csv", "is needed with data.kind: csv; it is a file of lines file,label")
    for key in ("criterion.supervised_epochs", "data.split.kind", "evaluation.knn_every_epochs"):
        if d.kind == "images" and values[key] != DEFAULTS[key]:
            text = (
                f"must be {as_yaml(DEFAULTS[key])} with data.kind: images, which reads no labels; use csv with a file "
                "of labels in data.csv, or image_folder"
            )
            wrong(key, text)
    if split.kind == "names" and d.kind not in FILES:
        text = f"names needs images that are files, and data.kind {d.kind} holds them in memory"
        wrong("data.split.kind", f"{text}; use bernoulli, stratified or all")
    needed = f"is needed with data.split.kind: {split.kind}"
    if split.kind == "names" and split.file is None:
        wrong("data.split.file", f"{needed}; it is a text file of one image name a line")
    if split.kind == "csv" and split.file is None and d.kind != "csv":
        wrong("data.split.file", f"{needed}, unless data.kind is csv too; a file of lines file,label")
    if split.kind == "bernoulli" and split.fraction is None:
        wrong("data.split.fraction", f"{needed}; 0.1 labels about 10 % of the images")
    if split.kind == "stratified" and split.images is None:
        wrong("data.split.images", f"{needed}; it is the number of labeled images")
    if config.evaluation.knn_every_epochs is not None and d.validation is None:
        wrong(
            "evaluation.knn_every_epochs", "needs data.validation, the images to classify; null turns it off"
        )

    # ---- batches and supervision
    c, epochs = config.criterion, config.criterion.supervised_epochs
    off = "" if c.needs_labels else "; or write supervised_epochs: 0 for no supervision"
    if split.kind == "none" and c.supervised:
        text = f"none leaves no labeled image, and criterion.supervised_epochs is {epochs}"
        wrong("data.split.kind", f"{text}; choose names, bernoulli, stratified, all or csv{off}")
    size = c.unsupervised_batch_size
    if (c.instance == "none") != (size == 0) or size == 1:
        text = f"must be 2 or more, or 0 with criterion.instance: none, and that is {c.instance}"
        wrong("criterion.unsupervised_batch_size", text)
    least = 2 if c.contrasts_labels else int(c.supervised)
    for key in ("criterion.classes_per_batch", "criterion.supervised_imgs_per_class"):
        # Not for {per_rank: N}, which depends on the processes.
        if isinstance(values[key], int) and values[key] < least:
            why = f"criterion.instance {c.instance} with criterion.supervision {c.supervision} needs labeled images"
            if c.contrasts_labels:
                why = f"criterion.supervision {c.supervision} contrasts classes, and images of one class"
            text = f"must be {least} or more while criterion.supervised_epochs is {epochs}: {why}"
            wrong(key, f"{text}{off}")
    if c.needs_labels and epochs != "all":
        text = f"must be all while criterion.instance is {c.instance}, not {epochs}"
        wrong("criterion.supervised_epochs", f"{text}: without labeled images no loss is left")
    if c.supervision == "none" and c.instance != "paws":
        text = f"none is only with criterion.instance: paws, and that is {c.instance}"
        wrong("criterion.supervision", f"{text}; choose a loss of labeled images{off}")
    if c.labeled_share is not None and epochs in (0, "all", "plateau"):
        text = f"keeps the passes through the labels that criterion.supervised_epochs makes, and that is {epochs}"
        wrong("criterion.labeled_share", f"{text}; write a number of epochs there, or remove labeled_share")
    for key in ("meta.compile", "meta.cuda_graph"):
        if c.micro_batch is not None and values[key] is True:
            wrong(
                "criterion.micro_batch",
                f"has not been tried with {key}: true; remove it, or write {key}: false",
            )

    # ---- views
    small, large, sizes = config.swav.small_size, d.augmentation.size, {d.augmentation.size}
    if c.instance in WITH_SMALL_CROPS and config.swav.small_crops:
        sizes.add(small)
        if small >= large:
            text = f"is {small}, and the large crops have {large} pixels (data.augmentation.size)"
            fix = "SwAV's sizes are 96 and 224. Make it smaller, or write swav.small_crops: 0"
            wrong("swav.small_size", f"{text}; {fix}")
    try:
        for size in sizes:
            Augmentation(**{**vars(d.augmentation), "size": size})
    except SettingsConflict as conflict:
        wrong(f"data.augmentation.{conflict.key}", conflict.text)

    # ---- model
    for key in ("model.init_sha256", "model.init_heads"):
        if model.init is None and values[key] != DEFAULTS[key]:
            wrong(key, "is read only with model.init, the file that it is of; remove it or write model.init")
    timm = f"with model.name: {model.name}, which is built as timm builds it"
    if model.name.startswith(TIMM) and model.stem != "imagenet":
        wrong("model.stem", f"must be imagenet {timm}")
    if model.name == "wide_resnet28w2" and model.stem != "cifar":
        wrong("model.stem", "must be cifar with model.name: wide_resnet28w2, which is for small images")
    if model.fused_batchnorm is True:
        if model.name.startswith(TIMM):
            wrong("model.fused_batchnorm", f"must be auto or false {timm}")
        if meta.compile:
            text = "has no effect with meta.compile: true, which fuses BatchNorm itself"
            wrong("model.fused_batchnorm", f"{text}; set one of the two to false")
        if not meta.channels_last:
            text = "has no effect with meta.channels_last: false, because its kernels read NHWC"
            wrong("model.fused_batchnorm", f"{text}; change one of the two")

    # ---- optimization
    o = config.optimization
    if o.epochs is None and o.steps is None:
        text = "is missing: how many passes over the unlabeled images"
        wrong("optimization.epochs", f"{text} (or optimization.steps: how many updates)")
    if o.steps is None and o.epochs is not None and o.warmup >= o.epochs:
        wrong("optimization.warmup", f"must be shorter than the run: {o.warmup:g} epochs of {o.epochs}")
    above = f"must not be above optimization.lr ({o.lr:g})"
    if o.start_lr > o.lr:
        wrong("optimization.start_lr", f"{above}: the warm-up rises from start_lr to lr")
    if o.final_lr > o.lr:
        wrong("optimization.final_lr", f"{above}: the cosine falls from lr to final_lr")
    if o.nesterov and o.momentum == 0:
        wrong("optimization.nesterov", "needs an optimization.momentum above 0")
    return problems
