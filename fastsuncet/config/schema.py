"""Every key of a config: its type, its default, what it means and what is allowed.

The vocabulary is the paper's and its authors' (`unsupervised_batch_size`, `supervised_imgs_per_class`,
`classes_per_batch`, `supervised_epochs`, `trust_coefficient`, `start_lr`, `lr`, `final_lr`, `warmup`). One meaning
differs on purpose: batch sizes count images over all processes, so that a config is the same experiment on one GPU
and on 64 (`{per_rank: 44}` is accepted as well).

A default is neutral, or the paper's value for both of its data sets. What differs between experiments (temperature,
batch size, learning rate) has no default: it must be written. Paths of images, lists and weights are relative to the
file that they are written in, those on the command line and logging.folder to the working directory; `~` is the home
folder. What settings mean together is in `rules.py`.

Values are validated in pydantic's strict mode: `epochs: true` is not 1, and `lr: "fast"` is not a number. Lists become
tuples, so that a frozen config cannot change anywhere.
"""

import json
import re
from collections.abc import Mapping
from functools import reduce
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from typing_extensions import TypeIs

from fastsuncet.config.problems import words
from pipelines.sampling.augmentation import Allowed, AreaShares, Augmentation, Pixels


# ------------------------------------------------------------------------------------------------------------- types
class Section(BaseModel):
    """A section of a config: frozen, strict, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def described(words: str) -> Allowed:
    """Return the words for a type that needs no check beyond pydantic's."""
    return Allowed(lambda _: True, words)


def is_table(value: object) -> TypeIs[str]:
    """Return whether a value of data.validation is the path of a CSV."""
    return isinstance(value, str) and value.lower().endswith(".csv")


def matching(pattern: str, words: str) -> Allowed:
    """Return a check of text by a regular expression."""
    return Allowed(lambda text: re.fullmatch(pattern, text) is not None, words)


# A number needs words only where they say more than its bounds. A larger one is a slip, and overflows somewhere.
MOST = 10**9
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Few = Annotated[int, Ge(1), Le(1000)]
FewOrZero = Annotated[int, Ge(0), Le(1000)]
Width = Annotated[int, Ge(1), Le(100_000)]
Prototypes = Annotated[Width, Ge(2), described("a whole number from 2 to 100,000")]
Seed = Annotated[int, Ge(0), Lt(2**63), described("a whole number from 0 to 2^63 - 1")]


class PerRank(Section):
    """A count that each process has, whatever their number."""

    per_rank: Count


ImageCount = Annotated[
    CountOrZero | PerRank,
    described("a whole number of images over all processes, or {per_rank: N}; up to 1e9"),
]
Epochs = Annotated[
    CountOrZero | Literal["all", "plateau"],
    described("a whole number of epochs, 0 or more, or all or plateau; at most 1e9"),
]
Positive = Annotated[float, Gt(0), Le(MOST)]
Strength = Annotated[Positive | Literal["auto"], described("a number above 0 and up to 1e9, or auto")]
NotNegative = Annotated[float, Ge(0), Le(MOST)]
Share = Annotated[float, Gt(0), Le(1), described("a share above 0 and up to 1, such as 0.1")]
PartialShare = Annotated[float, Gt(0), Lt(1), described("a share between 0 and 1, such as 0.1")]
ShareOrZero = Annotated[float, Ge(0), Le(1), described("a share from 0 to 1, such as 0.75")]
Momentum = Annotated[float, Ge(0), Lt(1)]


def different(values: tuple) -> bool:
    """Return whether there are values, and each is there once: folders have their names to six digits."""
    names = {f"{x:.6g}" if isinstance(x, float) else x for x in values}
    return 0 < len(names) == len(values)


Rates = Annotated[
    tuple[Positive, ...],
    Allowed(different, "a list of different numbers above 0 and up to 1e9, such as [0.001, 0.01]"),
]
Decays = Annotated[
    tuple[NotNegative, ...],
    Allowed(different, "a list of different numbers from 0 to 1e9, such as [0.001, 0.01]"),
]
Datasets = Annotated[
    tuple[Literal["cifar10", "cifar100", "voc07"], ...],
    Allowed(different, "a list of cifar10, cifar100 and voc07, each once"),
]
Exports = Annotated[
    tuple[Literal["torchvision", "timm", "safetensors", "onnx"], ...],
    Allowed(
        lambda names: different(names) or not names,
        "a list of torchvision, timm, safetensors and onnx, each once, or []",
    ),
]
TIMM = "timm/"  # before the name of a network of timm's
Network = Literal["resnet50", "resnet34", "resnet18", "wide_resnet28w2", "resnet_tiny"]
Backbone = Annotated[
    Network | Annotated[str, matching(rf"{TIMM}[A-Za-z0-9_]{{1,99}}", f"{TIMM}NAME")],
    described(f"{words(get_args(Network))}, or {TIMM}NAME with a name of timm's"),
]
Switch = Annotated[bool, described("true or false")]
AutoSwitch = Annotated[bool | Literal["auto"], described("true, false or auto")]
HeadBatchNorm = Annotated[bool | Literal["all"], described("true, false or all")]
TEXT = matching(r"[^\x00-\x1f]{1,4096}", "text, not empty and without control characters")
Text = Annotated[str, TEXT]
# Of what a run reads, relative to the file that has it. logging.folder, where a run writes, is taken as written.
InputPath = Annotated[str, "path", TEXT]
Sha256 = Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits in small letters")]
# A run's name becomes a folder's name. It cannot climb out of `logging.folder`, hide, or look like an option.
Name = Annotated[
    str,
    matching(
        r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}",
        "a name of up to 100 letters, digits and . _ - that begins with a letter, a digit or _",
    ),
]
BELOW = r"(?![/~])(?!(.*/)?\.\.(/|$))[^\\]+"  # a path that stays below its folder
Below = Annotated[Text, matching(BELOW, "a folder below data.root, without a leading / and without ..")]
Validation = Annotated[
    PartialShare | InputPath,
    described("a folder, a .csv file of lines file,label, or a share of the labels to hold out (0.2)"),
]


# ---------------------------------------------------------------------------------------------------------- sections
class MetaSection(Section):
    """How to compute. Only the seed is from the paper (its authors used 0)."""

    seed: Seed = 0
    """seed of all random numbers but those of data.split"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one"""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """of the network, not of the losses. auto: bf16 where the hardware computes it, fp16 on older GPUs, fp32 on
    other CPUs; the run keeps what was chosen
    """
    channels_last: Switch = True
    """keep images in NHWC memory format"""
    compile: Switch = False
    """torch.compile of the network; the first step then takes minutes"""
    cuda_graph: AutoSwitch = "auto"
    """run the step as one CUDA graph. auto: where a process has 384 views an update or fewer, and a trial on this
    machine has shown that a graph computes the same bits and is not slower
    """
    deterministic: Switch = True
    """false: fastest kernels; a resumed run differs in its last bits"""
    autotune: Switch | None = None
    """let cuDNN, and Inductor with meta.compile, time several algorithms and take the fastest; a restart can choose
    others, and then differs in its last bits. null: the opposite of deterministic
    """
    threads: Few | None = None
    """threads of torch on a CPU; null: torch decides"""
    timeout: Count = 1800
    """seconds that ranks wait for one that hangs; longer than a save, and than the first scan of the data"""


class SplitSection(Section):
    """Which training images count as labeled."""

    kind: Literal["none", "names", "bernoulli", "stratified", "all", "csv"] = "none"
    """none: SimCLR; names: those listed in a file; bernoulli: each image with a probability; stratified: a number of
    images, drawn in each class; csv: those a CSV labels
    """
    file: InputPath | None = None
    """names: one image name a line; csv: lines file,label (null: data.csv)"""
    sha256: Sha256 | None = None
    """of the file of names; the paper's two lists are known without it"""
    fraction: Share | None = None
    """bernoulli: probability that an image is labeled"""
    images: Count | None = None
    """stratified: labeled images in all, of each class in proportion to its images"""
    seed: Seed = 0
    """bernoulli, stratified: seed of the draw"""


class SyntheticSection(Section):
    """data.kind: synthetic: generated images to try settings without data; the same for the same meta.seed."""

    images: Count = 10_000
    """number of training images; a tenth as many validate"""
    classes: Width = 10
    """number of classes"""
    size: Pixels = 32
    """side of the images, in pixels"""


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True))
class AugmentationSection(Augmentation):
    """The training view: the settings of the pixels' own class."""

    def __post_init__(self) -> None:
        """Leave conflicts between settings to `rules.py`, which reports them with the other problems."""


class DataSection(Section):
    """Images, and which of them are labeled."""

    kind: Literal["image_folder", "images", "csv", "cifar10", "cifar100", "digits", "synthetic"]
    """image_folder: root/train/CLASS/IMAGE; images: any tree of images, without labels; csv: the same with labels
    in a file; digits: scikit-learn's; synthetic: generated
    """
    root: InputPath | None = None
    """folder that holds the images"""
    train: Below | None = None
    """folder of the training images, below root; null: train with image_folder, else root itself"""
    validation: Validation | None = "val"
    """validation images. A folder with a folder for each class, below root or with its whole path; FILE.csv: the
    training images that its lines file,label name; a share, such as 0.2: that many of the labeled images, drawn in each
    class. The last two are kept out of the training. null: none
    """
    csv: InputPath | None = None
    """csv: a file of lines file,label"""
    synthetic: SyntheticSection = SyntheticSection()
    download: Switch = False
    """cifar10, cifar100: download the images if root does not hold them"""
    split: SplitSection = SplitSection()
    index: InputPath | None = None
    """file with the list of training images below root; null: one in logging.folder, as always for those of pack"""
    pack: InputPath | None = None
    """training images as tar shards: a folder of `fastsuncet data pack`, or a pattern; null: read the files"""
    bad_images: CountOrZero = 0
    """how many undecodable images may be replaced before the run ends: by each process, in each of its two streams
    (unlabeled, labeled), counted anew when the run is started again
    """
    exif_orientation: Switch = True
    """turn and mirror images as the EXIF tag of phones and cameras says, in training and evaluation; false: as they are
    stored, which torchvision's folders and the paper's code show
    """
    max_megapixels: Annotated[float, Gt(0), Le(100)] = 100.0
    """images with more pixels count as bad; decoding takes 3 MB of memory a megapixel"""
    changed_images: Switch = False
    """continue a run although files of its images were written again since its last checkpoint"""
    backend: Literal["auto", "dali", "torchvision"] = "auto"
    """what makes the pixels"""
    view_operator: AutoSwitch = "auto"
    """make color, blur and normalization in this project's one operator for DALI, which the first run builds if there
    is a C++ compiler; false: in DALI's operators; on a CPU the values have the same bits. auto: where it can be
    built, on a GPU for training only, and if it passes a trial there
    """
    decode_threads: Few | None = None
    """of each stream of a process; null: its share of the cores, at most 16, which two streams share on a GPU"""
    prefetch: Few = 2
    """steps whose pixels are made ahead"""
    hw_decoder_share: ShareOrZero = 0.0
    """share of each pre-training batch for a GPU's hardware JPEG decoder. Between 0 and 1 two decoders share a
    batch by the sizes of its images, and their pixels differ: the run then depends on the number of GPUs. At 1 it
    does not, but on an H200 the step from files took longer than at 0
    """
    augmentation: AugmentationSection = AugmentationSection()

    @property
    def validation_table(self) -> str | None:
        """The CSV that names the validation images, if one does."""
        return self.validation if is_table(self.validation) else None

    @property
    def validation_folder(self) -> str | None:
        """The folder of the validation images, if they have one."""
        return self.validation if isinstance(self.validation, str) and not is_table(self.validation) else None


class ModelSection(Section):
    """The encoder and its projection head: 2048-2048-128 without BatchNorm in the paper."""

    name: Backbone = "resnet50"
    """the encoder; timm/NAME: any of timm's networks that maps images to one vector, such as timm/convnext_tiny"""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """cifar: first convolution 3x3, stride 1; no max-pool"""
    init: InputPath | None = None
    """weights that the encoder starts from: a file of torchvision, timm or the authors, an export, or the folder of
    a run or checkpoint; timm: timm's published weights of this network, which timm downloads the first time; null:
    drawn from meta.seed. They are read when a run starts, and never when it is continued
    """
    init_sha256: Sha256 | None = None
    """of the file in init, or of timm's tensors; null: the checkpoints record it"""
    init_heads: Switch = False
    """take the projection and the prediction head from init too"""
    hidden: Width = 2048
    """width of the projection head's hidden layers"""
    output: Width = 128
    """width of the embedding that the losses see"""
    head_batchnorm: HeadBatchNorm = False
    """BatchNorm before each ReLU of the projection head; all: of its output too, as in SimCLR's code"""
    head_layers: Literal[2, 3] = 2
    """linear layers of the projection head; PAWS has 3"""
    prediction_head: Switch = False
    """PAWS: a head on the projection, output -> output / 4 -> output with BatchNorm, whose outputs predict"""
    sync_batchnorm: Switch = True
    """BatchNorm statistics over all processes"""
    fused_batchnorm: AutoSwitch = "auto"
    """BatchNorm, the residual sum and ReLU in one pass over the pixels, by this project's CUDA kernels; no effect on a
    CPU. auto: where a trial on this machine has shown that they are right and not slower
    """

    @property
    def head(self) -> tuple[int, int, HeadBatchNorm, int, bool]:
        """The heads' settings, in the order of `models.resnet.build_model`'s arguments."""
        return self.hidden, self.output, self.head_batchnorm, self.head_layers, self.prediction_head


# Losses that contrast labeled images with each other, so that each needs a positive.
ContrastsLabels = Literal["suncet", "sup_con"]
# Losses on unlabeled images that see small crops beside the two large views of an image; all others see two views.
WITH_SMALL_CROPS = ("swav", "paws")


class CriterionSection(Section):
    """A loss on the unlabeled images plus one on the labeled images, weight 1 each (paper, section 3)."""

    instance: Literal["nt_xent", "swav", "paws", "none"] = "nt_xent"
    """loss of unlabeled images; paws: their classes by the labeled images near them; none: learn from labels alone"""
    supervision: Literal[ContrastsLabels, "cross_entropy", "none"] = "suncet"
    """loss of labeled images; sup_con: L_sup_out of the paper; none: only with instance: paws, where it is default"""
    temperature: Positive
    """tau of all contrastive losses, of SwAV and of PAWS"""
    unsupervised_batch_size: ImageCount
    """unlabeled images over all processes; 0 with none"""
    classes_per_batch: CountOrZero = 0
    """classes in a labeled batch over all processes"""
    supervised_imgs_per_class: ImageCount = 0
    """labeled images of each class over all processes"""
    supervised_views: Few = 1
    """random views of each labeled image in an update"""
    supervised_epochs: Epochs = 0
    """supervision is on before this epoch. 0: never on; all: on to the end; plateau: on until the epoch means of
    its loss stop falling (plateau_epochs, plateau_gain)
    """
    plateau_epochs: Count = 10
    """over how many epochs the falling of the loss is measured"""
    plateau_gain: Share = 0.01
    """share of the loss by which it must have fallen over plateau_epochs"""
    labeled_share: PartialShare | None = None
    """share of an update's views that are labeled (appendix D). The number of views an update and the number of
    passes over the labeled images stay those of the settings above; null: the settings above as written
    """
    keys: Literal["attached", "detached"] = "attached"
    """detached: no gradient flows through the keys"""
    average: Literal["sample", "class"] = "sample"
    """mean of the labeled loss; the two differ if classes are unbalanced"""
    chunk_size: Count | None = None
    """rows of the losses at a time; null: 128, of PAWS 512, on a GPU 4,096 and 8,192"""
    micro_batch: Count | None = None
    """views that pass through the network at a time, over all processes, so that a large batch fits into memory; null:
    all views of an update. The losses and their gradients are those of the whole batch. BatchNorm sees each piece
    alone, its running statistics move once a piece, and a second forward pass costs a third more compute
    """
    products: Literal["tf32", "fp32"] = "tf32"
    """dot products of the contrastive losses on a GPU. tf32: factors with 10 bits, only behind a network in bf16 or
    fp16, whose outputs have 7 or 10 bits; behind fp32 it is fp32. Sums are always float32
    """

    @model_validator(mode="before")
    @classmethod
    def _supervision_of_paws(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("instance") == "paws":
            return {"supervision": "none", **values}
        return values

    @property
    def supervised(self) -> bool:
        """Whether there are labeled images in at least one step."""
        return self.supervised_epochs != 0

    @property
    def needs_labels(self) -> bool:
        """Whether no loss is left without labeled images."""
        return self.instance in ("none", "paws")

    @property
    def contrasts(self) -> bool:
        """Whether a loss compares pairs (losses/contrast.py)."""
        return self.instance == "nt_xent" or self.contrasts_labels

    @property
    def contrasts_labels(self) -> bool:
        """Whether labeled images are contrasted with each other, so that each needs a positive."""
        return self.supervised and self.supervision in get_args(ContrastsLabels)


class SwavSection(Section):
    """Read with criterion.instance: swav, the small crops also with paws. The two large crops are data.augmentation's;
    the defaults are SwAV's.
    """

    prototypes: Prototypes = 3000
    """number of prototypes"""
    epsilon: Positive = 0.05
    """entropy of the Sinkhorn-Knopp assignment"""
    iterations: Few = 3
    """iterations of Sinkhorn-Knopp"""
    freeze_steps: CountOrZero = 313
    """updates before the prototypes are trained"""
    small_crops: FewOrZero = 6
    """small crops of each image"""
    small_size: Pixels = 96
    """side of a small crop, in pixels"""
    small_scale: AreaShares = (0.05, 0.14)
    """area of a small crop, as a share of the image's"""


class PawsSection(Section):
    """Read with criterion.instance: paws. The defaults are PAWS's; its small crops are those of swav."""

    sharpen: Share = 0.25
    """temperature T that sharpens a target; 1: as it is"""
    smoothing: Momentum = 0.1
    """share of a label that is spread over all classes"""
    me_max: Switch = True
    """push the mean of the sharpened predictions to the prior"""
    prior: Literal["uniform", "labels"] = "uniform"
    """share of each class among the unlabeled images; labels: that among the labeled ones, for unbalanced classes"""


class OptimizationSection(Section):
    """The optimizer and its schedule. The defaults are the paper's: LARS scales and decays every parameter alike."""

    optimizer: Literal["lars", "adamw", "sgd"] = "lars"
    """lars: for batches of thousands; adamw: for smaller ones and for timm's transformers, with lr near 0.001 and a
    weight decay of 0.01 to 0.1, which lr scales; sgd: with momentum. adamw and sgd are torch's fused ones
    """
    epochs: Count | None = None
    """passes over the unlabeled images"""
    steps: Count | None = None
    """updates; where epochs are written too, the later of the two counts, and steps in one file"""
    lr: Positive
    """learning rate after the warm-up"""
    start_lr: NotNegative = 0.0
    """learning rate at the start of the warm-up"""
    final_lr: NotNegative = 0.0
    """learning rate at the end of the cosine"""
    warmup: NotNegative = 0.0
    """length of the warm-up in epochs; fractions are allowed"""
    legacy_schedule: Switch = False
    """the authors' first release: lr rises again at the end"""
    momentum: Momentum = 0.9
    """momentum; of adamw: beta 1, with a beta 2 of 0.999"""
    weight_decay: NotNegative = 1e-6
    """lars: added to the gradient before scaling; sgd: to the gradient; adamw: lr times it is taken off the weight"""
    trust_coefficient: Positive = 0.001
    """lars: its local learning rate"""
    nesterov: Switch = False
    """lars, sgd: Nesterov momentum"""
    lr_in_momentum: Switch = False
    """lars: true: the learning rate is inside the momentum buffer"""
    exclude_bias_and_norm: Switch = False
    """true: no weight decay for biases and normalization layers; lars updates them by plain SGD"""


class LoggingSection(Section):
    """Where a run lives: `folder`/`write_tag`. The same command finds it again and continues it."""

    folder: Text = "runs"
    """folder that holds all runs"""
    write_tag: Name | None = None
    """name of the run; null: the name of the config file"""
    log_every: Count = 10
    """steps between two lines of metrics"""
    tensorboard: Switch = False
    """write TensorBoard events"""
    wandb: Text | None = None
    """project of Weights & Biases; null: none"""
    mlflow: Text | None = None
    """experiment of MLflow; null: none"""

    @property
    def trackers(self) -> dict[str, Any]:
        """Return the trackers that are asked for: their keys, which are the names of their packages, and the values."""
        return {key: value for key in ("tensorboard", "wandb", "mlflow") if (value := getattr(self, key))}


class CheckpointSection(Section):
    """When to save, apart from the end of the run and a signal (both intervals can be given), and what to export."""

    every: Count | None = None
    """steps between two checkpoints"""
    every_epochs: Count | None = 1
    """epochs between two checkpoints"""
    keep: Count = 3
    """how many of the newest checkpoints to keep, besides one that a signal asked for until the next is saved"""
    export: Exports = ("torchvision",)
    """what the encoder is exported to at the end of the run, as `fastsuncet export` does; []: nothing"""


class EvaluationSection(Section):
    """What is measured while training."""

    knn_every_epochs: Count | None = None
    """epochs between two k-NN evaluations; null: none"""
    knn_k: Count = 10
    """number of nearest neighbors"""


class FinetuneSection(Section):
    """`fastsuncet finetune`: encoder and new classifier on the labeled images (paper, App. B, 10 % of ImageNet)."""

    head: Literal["linear", "zero"] = "linear"
    """what the classifier starts from. zero: zeros, as in the paper; linear: the linear fit on the frozen features
    (Kumar et al. 2022, 2202.10054), with new BatchNorm statistics where the encoder's are stale. The rate is then
    bounded by the features' scale and the gradient's norm by 1, a batch has at most all labels, there are at least 300
    updates, and the result is the mean of the first and the last weights (Wortsman et al. 2022, 2109.01903)
    """
    epochs: Count = 30
    """passes over the labeled images; 1 % of ImageNet: 60; CIFAR-10: 90"""
    batch_size: ImageCount = 4096
    """labeled images over all processes; CIFAR-10: 256"""
    lr: Positive | None = None
    """learning rate; null: 0.05 x batch_size / 256"""
    momentum: Momentum = 0.9
    """momentum of SGD"""
    nesterov: Switch = True
    """Nesterov momentum"""
    weight_decay: NotNegative = 0.0
    """weight decay of SGD"""
    accumulate: Count = 1
    """passes for one update, to save memory; BatchNorm sees smaller parts"""
    crop_scale: AreaShares = (0.08, 1.0)
    """area of the random crop, as a share of the image's"""
    write_tag: Name | None = None
    """folder below the run's; null: from labels and checkpoint"""


class LinearSection(Section):
    """`fastsuncet evaluate linear`: logistic regression on frozen features."""

    strength: Strength = "auto"
    """inverse of the L2 penalty; auto: chosen by cross-validation on the labeled images"""
    max_iterations: Count = 1000
    """iterations of L-BFGS at most"""


class NpiSection(Section):
    """`fastsuncet evaluate npi`: SuNCEt's classifier without parameters (paper, appendix G)."""

    temperature: Positive | None = None
    """null: criterion.temperature"""
    views: FewOrZero = 1
    """random crops of each labeled image that join the supports; 0: its center crop, as PAWS has it"""
    features: Literal["encoder", "projection"] = "encoder"
    """what is compared; projection: the projection head's output, as PAWS has it"""


class TransferSection(Section):
    """`fastsuncet transfer`: the grid of fine-tuning runs on other data sets (paper, appendix C)."""

    root: InputPath | None = None
    """folder of cifar-10-batches-py, cifar-100-python, VOCdevkit, or of these in folders cifar10, cifar100, voc07"""
    datasets: Datasets = ("cifar10", "cifar100", "voc07")
    """the data sets to fine-tune on"""
    download: Switch = False
    """cifar10, cifar100: download them if root does not hold them"""
    steps: Count = 20_000
    """updates of each run"""
    batch_size: ImageCount = 256
    """images over all processes"""
    momentum: Momentum = 0.9
    """momentum of SGD"""
    learning_rates: Rates = (1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1)
    """of the grid"""
    weight_decays: Decays = (1e-6, 10**-5.5, 1e-5, 10**-4.5, 1e-4, 10**-3.5, 1e-3, 0.0)
    """weight decays of the grid, each divided by the learning rate"""
    size: Pixels = 224
    """side of a crop, in pixels"""
    resize: Pixels = 256
    """shorter side before the center crop, in pixels"""
    validation: PartialShare = 0.1
    """share of CIFAR's training images; VOC07 has a validation set"""


class Sections(Section):
    """The sections. `fastsuncet.config.Config` adds what they mean together."""

    data: DataSection
    criterion: CriterionSection
    optimization: OptimizationSection
    model: ModelSection = ModelSection()
    meta: MetaSection = MetaSection()
    logging: LoggingSection = LoggingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    swav: SwavSection = SwavSection()
    paws: PawsSection = PawsSection()
    finetune: FinetuneSection = FinetuneSection()
    linear: LinearSection = LinearSection()
    npi: NpiSection = NpiSection()
    transfer: TransferSection = TransferSection()


# ------------------------------------------------------------------------------------------- the schema by dotted key
class Schema:
    """The fields of nested sections: `sections[dotted section][name]` ("" is the top level), `values[dotted key]`."""

    def __init__(self, model: type[Section]):
        self.sections: dict[str, dict[str, FieldInfo]] = {}
        self.values: dict[str, FieldInfo] = {}
        self._model = model
        self._add("", model)

    def __reduce__(self) -> tuple[Any, ...]:
        # A config can be pickled and copied; the checks of its fields, which are functions, cannot.
        return Schema, (self._model,)

    def _add(self, section: str, model: Any) -> None:
        self.sections[section] = model.__pydantic_fields__
        for name, field in model.__pydantic_fields__.items():
            key = f"{section}.{name}".lstrip(".")
            if isinstance(field.annotation, type) and issubclass(field.annotation, (Section, Augmentation)):
                self._add(key, field.annotation)
            else:
                self.values[key] = field


CONFIG = Schema(Sections)
INPUTS = [
    name for name, field in CONFIG.values.items() if {InputPath, Validation} & {*get_args(field.annotation)}
]


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return dotted key -> value of nested values; {per_rank: 44} stays one value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        inner = isinstance(value, Mapping) and key not in CONFIG.values
        found |= flat(value, f"{key}.") if inner else {key: value}
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that `flat` made `values` of."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *above, name = key.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), above, sections)[name] = value
    return sections


# Dotted key -> default in the types of JSON, of each key that need not be written.
DEFAULTS: dict[str, Any] = {
    key: json.loads(json.dumps(field.default))
    for key, field in CONFIG.values.items()
    if not field.is_required()
}
# Values of the others with which rules are checked where what was written is wrong.
STAND_INS = {
    "data.kind": "synthetic",
    "criterion.temperature": 1.0,
    "criterion.unsupervised_batch_size": 2,
    "optimization.lr": 1.0,
}
