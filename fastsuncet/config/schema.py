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

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import Self

from fastsuncet.config.types import (
    AreaShares,
    BatchSize,
    Below,
    Count,
    CountOrZero,
    Datasets,
    Epochs,
    ImagesPerClass,
    Momentum,
    Name,
    NotNegative,
    Numbers,
    Positive,
    Section,
    Seed,
    Sha256,
    Share,
    ShareOrZero,
    Switch,
    Text,
)
from pipelines.sampling.augmentation import Augmentation


class Meta(Section):
    """How to compute. None of it is the paper's but the seed (its authors used 0)."""

    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"  # of the network; criterion.products: of the losses
    channels_last: Switch = True
    compile: Switch = False  # torch.compile of the network: the first step takes minutes
    cuda_graph: Switch = False  # the step as one CUDA graph; off until it has been measured on a card
    deterministic: Switch = True  # false: whatever kernel is fastest; a resumed run differs in its bits
    threads: Count | None = None  # of torch on a CPU; null: torch decides


class Split(Section):
    """Which training images count as labeled."""

    kind: Literal["none", "names", "bernoulli", "all", "csv"] = "none"
    file: Text | None = None  # names: one image name a line; csv: lines file,label (null: those of data.csv)
    sha256: Sha256 | None = None  # names: of that file; the paper's two lists are known without it
    fraction: Share | None = None  # bernoulli: each image is labeled with this probability, independently
    seed: Seed = 0  # bernoulli: of that draw


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class AugmentationSection(Augmentation):
    """The training view: the settings of the pixels' own class."""

    def __post_init__(self) -> None:
        """Leave what two settings mean together to `rules.py`, which can name the line."""


class Data(Section):
    """Images, and which of them are labeled."""

    kind: Literal["image_folder", "csv", "cifar10", "cifar100", "digits"] = Field(examples=["image_folder"])
    root: Text | None = None
    train: Below = "train"  # folder below root
    validation: Below | None = "val"  # folder below root; null: there is none
    csv: Text | None = None  # csv: a file of lines file,label
    download: Switch = False  # cifar10, cifar100: fetch it into root if it is not there
    split: Split = Split()
    index: Text | None = None  # where the scanned list of training images is kept; null: beside the runs
    pack: Text | None = (
        None  # the training images as one file, which `fastsuncet data pack` makes; null: the files
    )
    # How many undecodable images may be replaced before the run ends: by each process, in each of its two streams
    # (unlabeled, labeled), counted anew when the run is started again.
    bad_images: CountOrZero = 0
    backend: Literal["auto", "dali", "torchvision"] = "auto"
    # What DALI makes exact color with; on a CPU the pixels are the same bits. plugin: our own operator, which
    # `python -m pipelines.dali.plugin` builds; graph: DALI's; auto: our own where it was built, and on a GPU DALI's.
    color_operator: Literal["auto", "graph", "plugin"] = "auto"
    # Of each of a process's streams; null: its share of the machine's cores, 16 at most.
    decode_threads: Count | None = None
    prefetch: Count = 2  # steps whose pixels are made ahead
    # Of each batch, to a GPU's hardware JPEG decoder, in pre-training. Above 0 two decoders share a batch by position,
    # and their pixels need not agree to the bit: the same run on another number of GPUs is then another.
    hw_decoder_share: ShareOrZero = 0.0
    # Memory of a GPU's decoders: grown as images come, or at the start enough for the largest one of the index, which
    # takes 6 bytes a pixel of it on the GPU and 12 in the host's memory, for each thread of each stream.
    decoder_buffers: Literal["grown", "largest"] = "grown"
    augmentation: AugmentationSection = AugmentationSection()


class Model(Section):
    """The encoder and its projection head: 2048-2048-128 without BatchNorm in the paper."""

    name: Literal["resnet50", "resnet34", "resnet18", "resnet_tiny"] = "resnet50"
    library: Literal["torchvision", "timm"] = "torchvision"
    stem: Literal["imagenet", "cifar"] = "imagenet"  # cifar: 3x3 stride 1 and no max-pool
    hidden: Count = 2048
    output: Count = 128
    head_batchnorm: Switch = False
    sync_batchnorm: Switch = True  # BatchNorm statistics over all processes
    # BatchNorm, the sum with a block's input and ReLU in one pass over the pixels, by our own CUDA kernels. Off until
    # it has been measured on a card; on a CPU it changes nothing.
    fused_batchnorm: Switch = False


class Criterion(Section):
    """A loss on the unlabeled images plus one on the labeled ones, weight 1 each (paper, section 3)."""

    instance: Literal["nt_xent", "swav", "none"] = "nt_xent"  # of unlabeled images; none: labels alone
    supervision: Literal["suncet", "cross_entropy", "sup_con"] = (
        "suncet"  # of labeled ones; sup_con: L_sup_out
    )
    temperature: Positive = Field(examples=[0.1])  # tau of all contrastive losses and of SwAV
    unsupervised_batch_size: BatchSize = Field(examples=[256])  # images over all processes; 0 with none
    classes_per_batch: CountOrZero = 0  # the same classes on all processes
    supervised_imgs_per_class: ImagesPerClass = 0  # images over all processes, one view each
    # Supervision is on before this epoch and off from it on. 0: never on; all: to the end; plateau: until the epoch
    # means of its loss have stopped falling (plateau_epochs, plateau_gain; fastsuncet/training/plateau.py).
    supervised_epochs: Epochs = 0
    plateau_epochs: Count = 10  # how far back the loss is compared
    plateau_gain: Share = 0.01  # the share of it that must have gone since
    # Appendix D: the labeled share of an update's views, at the views of the batch sizes above and the same number of
    # passes through the labeled images as they and supervised_epochs make; null: as written above.
    labeled_share: Share | None = None
    keys: Literal["attached", "detached"] = "attached"  # does the gradient reach the other side of a pair?
    average: Literal["sample", "class"] = "sample"  # they differ only where classes are unbalanced
    chunk_size: Count | None = None  # rows per sweep of the losses; null: 128, on a GPU 1,024
    # Of the contrastive losses on a GPU. tf32: factors of 10 bits, and only behind a network in bf16 or fp16, whose
    # rows have 7 or 10 themselves; behind fp32 it is fp32. Sums are float32 always.
    products: Literal["tf32", "fp32"] = "tf32"

    @property
    def supervised(self) -> bool:
        """Whether supervision is on for at least one step."""
        return self.supervised_epochs != 0

    @property
    def contrasts_labels(self) -> bool:
        """Whether labeled images are contrasted with each other, so that each needs a positive."""
        return self.supervised and self.supervision != "cross_entropy"


class Swav(Section):
    """Read with criterion.instance: swav. Two large crops are data.augmentation's; the defaults are SwAV's own."""

    prototypes: Count = 3000
    epsilon: Positive = 0.05  # of Sinkhorn-Knopp
    iterations: Count = 3
    freeze_steps: CountOrZero = 313  # updates before the prototypes move
    small_crops: CountOrZero = 6
    small_size: Count = 96  # pixels, square
    small_scale: AreaShares = (0.05, 0.14)  # share of the image's area


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


class Finetune(Section):
    """`fastsuncet finetune`: encoder and new classifier on the labeled images (paper, App. B, 10 % of ImageNet)."""

    epochs: Count = 30  # 1 % of ImageNet: 60; CIFAR-10: 90
    batch_size: BatchSize = 4096  # CIFAR-10: 256
    lr: Positive | None = None  # null: 0.05 x batch_size / 256
    momentum: Momentum = 0.9
    nesterov: Switch = True
    weight_decay: NotNegative = 0.0
    accumulate: Count = 1  # passes an update: the same batch in less memory, BatchNorm over smaller parts
    crop_scale: AreaShares = (0.08, 1.0)
    write_tag: Name | None = None  # of the folder below the run's; null: the labels' and the checkpoint's


class Linear(Section):
    """`fastsuncet evaluate linear`: logistic regression on frozen representations."""

    strength: Positive = 1.0  # inverse of the L2 penalty
    max_iterations: Count = 1000


class Npi(Section):
    """`fastsuncet evaluate npi`: SuNCEt's own classifier without parameters (paper, appendix G)."""

    temperature: Positive | None = None  # null: criterion.temperature
    views: Count = 1  # random crops of each labeled image that join the supports


class Transfer(Section):
    """`fastsuncet transfer`: the grid of fine-tuning runs on other data sets (paper, appendix C)."""

    # Folder that holds cifar-10-batches-py, cifar-100-python, VOCdevkit, or these in folders cifar10, cifar100, voc07.
    root: Text | None = None
    datasets: Datasets = ("cifar10", "cifar100", "voc07")
    download: Switch = False  # cifar10, cifar100
    steps: Count = 20_000
    batch_size: BatchSize = 256
    momentum: Momentum = 0.9
    learning_rates: Numbers = (1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1)
    weight_decays: Numbers = (1e-6, 10**-5.5, 1e-5, 10**-4.5, 1e-4, 10**-3.5, 1e-3, 0.0)  # over lr
    size: Count = 224  # pixels of a crop
    resize: Count = 256  # pixels of the shorter side before the centre crop
    validation: Share = 0.1  # of CIFAR's training images, for choosing a cell; VOC07 has its own


class Sections(BaseModel):
    """The sections. `fastsuncet.config.Config` adds what they mean together."""

    model_config = Section.model_config

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The sections of plain nested values. Raises pydantic's ValidationError."""
        # From JSON, because pydantic's strict mode then takes a list for a tuple and an object for a dataclass.
        return cls.model_validate_json(json.dumps(values))

    data: Data
    criterion: Criterion
    optimization: Optimization
    model: Model = Model()
    meta: Meta = Meta()
    logging: Logging = Logging()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    swav: Swav = Swav()
    finetune: Finetune = Finetune()
    linear: Linear = Linear()
    npi: Npi = Npi()
    transfer: Transfer = Transfer()


def section_of(field: Any) -> Any:
    """The section class a pydantic field holds, None for a plain value."""
    annotation = field.annotation
    return (
        annotation
        if isinstance(annotation, type) and issubclass(annotation, (Section, Augmentation))
        else None
    )
