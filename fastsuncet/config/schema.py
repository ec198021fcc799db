"""Every key a config can hold, and its default. What the values may be is in `types.py`, what they mean
together in `rules.py`.

The vocabulary is the paper's and its authors' (`unsupervised_batch_size`, `supervised_imgs_per_class`,
`classes_per_batch`, `supervised_epochs`, `trust_coefficient`, `start_lr`, `lr`, `final_lr`, `warmup`). One
meaning differs on purpose: batch sizes count images over ALL processes, so that a config is the same
experiment on one GPU and on 64 (`{per_rank: 44}` is accepted as well).

A default is neutral, or the paper's value for both of its data sets. What differs between experiments
(temperature, batch size, learning rate) has none: it must be written. Paths are taken from the working
directory, and `~` is the home folder.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from fastsuncet.config.types import (
    BatchSize,
    Below,
    BlurWindow,
    Count,
    CountOrZero,
    Epochs,
    ImagesPerClass,
    Mean,
    Momentum,
    Name,
    NotNegative,
    Positive,
    Probability,
    Range,
    Section,
    Seed,
    Sha256,
    Share,
    Shares,
    Std,
    Strength,
    Switch,
    Text,
)


class Meta(Section):
    """How to compute. None of it is the paper's but the seed (its authors used 0)."""

    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"  # of the network; the losses are always float32
    channels_last: Switch = True
    compile: Switch = False  # torch.compile of the network: the first step takes minutes
    threads: Count | None = None  # of torch on a CPU; null: torch decides


class Split(Section):
    """Which training images count as labeled."""

    kind: Literal["none", "names", "bernoulli", "all", "csv"] = "none"
    file: Text | None = None  # names: one image name a line; csv: lines file,label (null: those of data.csv)
    sha256: Sha256 | None = None  # names: of that file; the paper's two lists are known without it
    fraction: Share | None = None  # bernoulli: each image is labeled with this probability, independently
    seed: Seed = 0  # bernoulli: of that draw


class Augmentation(Section):
    """The training view, in the order of its operations. The defaults are the paper's for ImageNet.

    `strength` is s of the paper: brightness, contrast and saturation change by up to 0.8s, the hue by up to
    0.2s of a turn.
    """

    size: Count = 224  # pixels, square
    crop_scale: Shares = (0.08, 1.0)  # share of the image's area
    crop_ratio: Range = (3 / 4, 4 / 3)  # width / height
    flip: Probability = 0.5  # left-right
    jitter: Probability = 0.8  # that the colours are jittered at all
    strength: Strength = 1.0
    grey: Probability = 0.2
    blur: Probability = 0.5
    blur_sigma: Range = (0.1, 2.0)  # pixels of the finished crop
    blur_window: BlurWindow = "auto"  # pixels; auto: as wide as sigma asks for; 23: SimCLR's at 224
    color: Literal["exact", "fast"] = "exact"  # exact: torchvision's contrast and hue; fast: one linear twist
    mean: Mean = (0.0, 0.0, 0.0)  # of pixels in [0, 1]; the authors trained without normalisation
    std: Std = (1.0, 1.0, 1.0)


class Data(Section):
    """Images, and which of them are labeled."""

    kind: Literal["image_folder", "csv", "cifar10", "digits"] = Field(examples=["image_folder"])
    root: Text | None = None
    train: Below = "train"  # folder below root
    validation: Below | None = "val"  # folder below root; null: there is none
    csv: Text | None = None  # csv: a file of lines file,label
    download: Switch = False  # cifar10: fetch it into root if it is not there
    split: Split = Split()
    index: Text | None = None  # where the scanned list of training images is kept; null: beside the runs
    # How many undecodable images may be replaced before the run ends: by each process, in each of its two streams
    # (unlabeled, labeled), counted anew when the run is started again.
    bad_images: CountOrZero = 0
    backend: Literal["auto", "dali", "torchvision"] = "auto"
    decode_threads: Count = 3
    prefetch: Count = 2  # steps whose pixels are made ahead
    augmentation: Augmentation = Augmentation()


class Model(Section):
    """The encoder and its projection head: 2048-2048-128 without BatchNorm in the paper."""

    name: Literal["resnet50", "resnet34", "resnet18", "resnet_tiny"] = "resnet50"
    library: Literal["torchvision", "timm"] = "torchvision"
    stem: Literal["imagenet", "cifar"] = "imagenet"  # cifar: 3x3 stride 1 and no max-pool
    hidden: Count = 2048
    output: Count = 128
    head_batchnorm: Switch = False
    sync_batchnorm: Switch = True  # BatchNorm statistics over all processes


class Criterion(Section):
    """NT-Xent on the unlabeled images plus SuNCEt on the labeled ones, weight 1 each (paper, section 3)."""

    temperature: Positive = Field(examples=[0.1])  # tau of both losses
    unsupervised_batch_size: BatchSize = Field(examples=[256])  # images over all processes, two views each
    classes_per_batch: CountOrZero = 0  # the same classes on all processes
    supervised_imgs_per_class: ImagesPerClass = 0  # images over all processes, one view each
    supervised_epochs: Epochs = 0  # SuNCEt is on before this epoch and off from it on; 0: SimCLR
    keys: Literal["attached", "detached"] = "attached"  # does the gradient reach the other side of a pair?
    average: Literal["sample", "class"] = "sample"  # they differ only where classes are unbalanced
    chunk_size: Count | None = None  # rows per sweep of the losses; null: 128

    @property
    def supervised(self) -> bool:
        """Whether SuNCEt is on for at least one step."""
        return self.supervised_epochs != 0


class Optimization(Section):
    """LARS and its schedule. The defaults are the paper's profile: every parameter scaled and decayed
    alike.
    """

    epochs: Count | None = None  # passes over the unlabeled images
    steps: Count | None = None  # updates; decides over epochs where both are written
    lr: Positive = Field(examples=[1.0])
    start_lr: NotNegative = 0.0  # the warm-up begins here
    final_lr: NotNegative = 0.0  # the cosine ends here
    warmup: NotNegative = 0.0  # epochs; fractions are allowed
    legacy_schedule: Switch = False  # the authors' first release, whose lr rises again at the end
    momentum: Momentum = 0.9
    weight_decay: NotNegative = 1e-6
    trust_coefficient: Positive = 0.001
    nesterov: Switch = False
    lr_in_momentum: Switch = False  # true: the classic form, lr inside the momentum buffer
    exclude_bias_and_norm: Switch = False  # true: biases and BatchNorm by plain SGD without weight decay


class Logging(Section):
    """Where a run lives: `folder`/`write_tag`. The same command finds it again and continues."""

    folder: Text = "runs"
    write_tag: Name | None = None  # null: the name of the config file
    log_every: Count = 10  # steps
    tensorboard: Switch = False
    wandb: Text | None = None  # name of a project


class Checkpoint(Section):
    """When to save, beside the end of the run and a signal; both may be given."""

    every: Count | None = None  # steps
    every_epochs: Count | None = 1
    keep: Count = 3  # the newest ones


class Evaluation(Section):
    """What is measured while training."""

    knn_every_epochs: Count | None = None
    knn_k: Count = 10


class Sections(BaseModel):
    """The eight sections. `fastsuncet.config.Config` adds what they mean together."""

    model_config = Section.model_config

    data: Data
    criterion: Criterion
    optimization: Optimization
    model: Model = Model()
    meta: Meta = Meta()
    logging: Logging = Logging()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()


def section_of(field: Any) -> type[Section] | None:
    """The section class a pydantic field holds, None for a plain value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None
