"""Every method of a run, small, and its network and losses in float64."""

from typing import get_args

import torch
import torch.nn.functional as F

from fastsuncet.config import Config, load_config
from fastsuncet.config.schema import ContrastsLabels
from fastsuncet.data.paired_stream import Batch
from fastsuncet.data.paired_stream import views as shown_views
from fastsuncet.models.sync_batchnorm import synchronize
from fastsuncet.training import methods
from fastsuncet.training.multi_view_model import MultiViewModel
from fastsuncet.training.step import build_model, in_float32
from tests.support import dense_losses
from tests.support.runs import CONFIGS, tiny_config

LABELS_ALONE = [
    "criterion.instance=none",
    "criterion.unsupervised_batch_size=0",
    "criterion.supervised_epochs=all",
]
SMALL_CROPS = ["swav.small_crops=3", "swav.small_size=8"]
SWAV = ["criterion.instance=swav", "swav.prototypes=12", "swav.freeze_steps=4", *SMALL_CROPS]
PAWS = ["criterion.instance=paws", "criterion.supervised_epochs=all"]
PAWS_HEADS = ["model.prediction_head=true", "model.head_batchnorm=true", "model.head_layers=3"]
METHODS = {
    "SimCLR": ["criterion.supervised_epochs=0"],
    "SimCLR + cross-entropy": ["criterion.supervision=cross_entropy"],
    # Of each of them: L_sup_out, and what is added.
    **{
        f"SimCLR + {methods.TERMS[loss].title}": [f"criterion.supervision={loss}"]
        for loss in get_args(ContrastsLabels)
    },
    "labels alone, SuNCEt": LABELS_ALONE,
    "labels alone, L_sup_out": [*LABELS_ALONE, "criterion.supervision=sup_con", "model.head_batchnorm=all"],
    "labels alone, cross-entropy": [*LABELS_ALONE, "criterion.supervision=cross_entropy"],
    "SwAV": [*SWAV, "criterion.supervised_epochs=0"],
    "SwAV + SuNCEt": SWAV,
    "PAWS": [*PAWS, *PAWS_HEADS, *SMALL_CROPS, "paws.prior=labels", "criterion.supervised_views=2"],
    "PAWS + SuNCEt": [*PAWS, "criterion.supervision=suncet", "swav.small_crops=0"],
}
U, CLASSES, PER_CLASS = 4, 3, 4  # images over all ranks
PER_CLASS_IN_ALL = torch.tensor([4.0, 1.0, 5.0], dtype=torch.float64)  # labeled images of the data set
TAU = 0.2
CPU = torch.device("cpu")


def config_of(method: str, *overrides: str) -> Config:
    """Return a config of `method` with small heads."""
    heads = ["model.stem=cifar", "model.hidden=16", "model.output=8"]
    return load_config(CONFIGS / "digits_demo.yaml", [*heads, *METHODS[method], *overrides])


def small(folder, method: str, *overrides: str) -> Config:
    """Return a run of ten steps of `method`."""
    options = METHODS[method]
    if LABELS_ALONE[0] in options:
        options = [*options, "optimization.warmup=0"]
    return tiny_config(folder, *options, *overrides)


def batch_of(config: Config, labeled: int, images: int = 6, seed: int = 0) -> Batch:
    """Return a made-up batch for a step."""
    draw, size = torch.Generator().manual_seed(seed), config.data.augmentation.size
    shown = tuple(torch.rand(images, 3, v.size, v.size, generator=draw) for v in shown_views(config))
    rows = torch.rand(labeled, 3, size, size, generator=draw)
    return Batch(0, shown, rows, torch.arange(labeled) // 2)


def images(config: Config) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return a made-up global batch in float64: views, labeled images in the sampler's interleaved order, labels."""
    batch = batch_of(config, CLASSES * PER_CLASS if config.criterion.supervised else 0, U, seed=3)
    labels = torch.arange(len(batch.labeled)) % CLASSES
    return [view.double() for view in batch.views], batch.labeled.double(), labels


def network(config: Config) -> MultiViewModel:
    """Return the model of a run, in float64."""
    return MultiViewModel(synchronize(build_model(config, CLASSES))).double()


def loss_and_gradients(config: Config, network: torch.nn.Module, views, labeled, labels) -> tuple:
    out = in_float32(network(views, labeled))
    losses = [loss(out, labels) for loss in methods.losses(config, PER_CLASS_IN_ALL)]
    sum(losses).backward()
    gradients = {name.removeprefix("module."): p.grad for name, p in network.named_parameters()}
    return torch.stack([loss.detach() for loss in losses]), gradients


def dense(config: Config, network: MultiViewModel, views, labeled, labels) -> torch.Tensor:
    """Return the two losses as the paper writes them, dense, by autograd, from one pass per resolution."""
    model, c = network.model, config.criterion
    assert c.temperature == TAU
    h = model.encoder(torch.cat([*views[:2], labeled]))
    large = sum(map(len, views[:2]))
    small = [model.encoder(torch.cat(views[2:]))] if views[2:] else []
    instance = supervised = h.new_zeros(())
    if c.instance == "paws":  # the heads see one resolution at a time
        z, z_small = model.head(h), [model.head(rows) for rows in small]
        predicted, z_labeled = model.predictor(z), z[large:]
        anchors = torch.cat([predicted[:large], *map(model.predictor, z_small)])
        swapped = torch.cat([z[large // 2 : large], z[: large // 2]])
        prior = PER_CLASS_IN_ALL[labels] if config.paws.prior == "labels" else None
        options = {"views": len(views), "temperature": TAU, "prior": prior}
        instance = sum(dense_losses.paws(anchors, predicted[large:], labels, swapped, z_labeled, **options))
    else:
        z = model.head(torch.cat([h[:large], *small, h[large:]]))
        z, z_labeled = z.split([sum(map(len, views)), len(labeled)])
    if c.instance == "nt_xent":
        instance = dense_losses.nt_xent(z, TAU)
    elif c.instance == "swav":
        scores = F.normalize(z) @ model.prototypes.weight.T
        instance = dense_losses.swav(scores, TAU, crops=len(views))
    if c.supervised and c.supervision == "cross_entropy":
        supervised = F.cross_entropy(model.classifier(h[large:]), labels)
    elif c.supervised and c.supervision != "none":
        supervised = getattr(dense_losses, c.supervision)(z_labeled, labels, TAU)
    return torch.stack([instance, supervised])
