"""The training step, as the paper writes it, and the network, optimizer and precision that it uses.

Everything fast (channels-last, autocast, DDP, compile, CUDA graphs) wraps the step from outside.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastsuncet.config import Arithmetic, Config
from fastsuncet.config.schema import OptimizationSection
from fastsuncet.data.paired_stream import Batch, views
from fastsuncet.distributed.place import Place
from fastsuncet.models import resnet
from fastsuncet.models.flops import norm_shapes
from fastsuncet.optim import LARS, SGD, AdamW, DeviceLR, parameter_groups
from fastsuncet.training import methods
from fastsuncet.training.determinism import PRECISIONS
from fastsuncet.training.multi_view_model import MultiViewModel, Outputs, PiecewiseModel


def train_step(
    network: nn.Module, optimizer: DeviceLR, batch: Batch, lr: float | torch.Tensor, method: "StepMethod"
) -> torch.Tensor:
    """Make one update of SimCLR + SuNCEt (paper section 3, equations 1 and 2), or of another method, on one rank.

    Returns (4,) on the device: the two losses, and the norm of the gradient of each with respect to what it reads of
    the network's outputs. No host sync.
    """
    optimizer.set_lr(lr)
    method.before_update()
    with method.autocast():
        out = network(batch.views, batch.labeled)  # one forward: all images share BatchNorm
    out = in_float32(out)
    instance_loss = method.instance_loss(out, batch.labels)  # NT-Xent
    supervised_loss = method.supervised_loss(out, batch.labels)  # SuNCEt; 0 once switched off, no branch
    watched = methods.loss_inputs(out)
    for x in watched:
        if x.requires_grad:
            x.retain_grad()
    # DDP averages the gradients over ranks in here.
    method.scaler.scale(instance_loss + supervised_loss).backward()
    norms = gradient_norms(watched) / method.scaler.scale(method.one)
    method.freeze(batch.step)
    method.scaler.step(optimizer)  # LARS
    method.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return torch.cat([torch.stack([instance_loss.detach(), supervised_loss.detach()]), norms])


def in_float32(out: Outputs) -> Outputs:
    """Return the losses' inputs in at least float32: a mixed-precision network ends in 16 bits."""
    return Outputs._make(x if x is None or x.dtype == torch.float64 else x.float() for x in out)


def gradient_norms(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norms of the gradients that backward kept, (len(inputs),); 0 where no loss read the input."""
    grads = [x.new_zeros(1) if x.grad is None else x.grad for x in inputs]
    return torch.stack([torch.linalg.vector_norm(grad) for grad in grads])


class StepMethod:
    """What a step needs besides network, optimizer and batch: the method's losses, learning rate, precision."""

    def __init__(
        self, config: Config, model: resnet.Model, device: torch.device, per_class: Sequence[int] = ()
    ):
        counts = torch.tensor(per_class, dtype=torch.float32, device=device) if len(per_class) else None
        self.instance_loss, self.supervised_loss = methods.losses(config, counts)
        self.prototypes = model.prototypes.weight if model.prototypes is not None else None
        self.freeze_steps = config.swav.freeze_steps
        self.device = device
        self.dtype = PRECISIONS[config.meta.precision]
        self.in_pieces = config.criterion.micro_batch is not None
        # On the device, so that a captured step reads the present value and not that of the capture.
        self.lr = torch.zeros((), device=device)
        self.one = torch.ones((), device=device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def before_update(self) -> None:
        """SwAV: normalize the prototypes again, which the last update moved off the sphere."""
        if self.prototypes is not None:
            from fastsuncet.losses.swav import normalize_prototypes_

            normalize_prototypes_(self.prototypes)

    def freeze(self, step: int) -> None:
        """SwAV: leave the prototypes unchanged in the first updates, or all codes could collapse onto a few."""
        if self.prototypes is not None and step < self.freeze_steps:
            self.prototypes.grad = None

    def autocast(self) -> torch.autocast:
        """Return mixed precision for the forward pass; the losses are computed in float32."""
        enabled = self.dtype != torch.float32
        # A cached 16-bit weight would also sum the gradients of all pieces in 16 bits.
        return torch.autocast(self.device.type, self.dtype, enabled=enabled, cache_enabled=not self.in_pieces)


def build_model(config: Config, classes: int, **options: Any) -> resnet.Model:
    """Return the model of the config's method, which has a classifier of so many `classes` or none."""
    m, instance = config.model, config.criterion.instance
    return resnet.build_model(
        *(m.name, m.stem, *m.head),
        predicts=instance == "paws",
        classes=classes if methods.has_classifier(config) else None,
        prototypes=config.swav.prototypes if instance == "swav" else None,
        **options,
    )


def build(
    config: Config,
    place: Place,
    classes: int,
    per_class: Sequence[int] = (),
    sizes: Arithmetic | None = None,  # of the run that trains it; needed to compile one graph, not two
) -> tuple[resnet.Model, nn.Module, DeviceLR, StepMethod]:
    """Return the model, the network that trains it, its optimizer, its method.

    `classes` of the data set are for a method with a classifier, `per_class`, their numbers of labeled images, for
    paws.prior: labels. Weights depend on the seed alone: every rank builds the same ones, on any device.
    """
    m, model = config.model, build_model(config, classes, seed=config.meta.seed)
    if m.fused_batchnorm is True:
        from fastsuncet.models.sync_batchnorm import fuse

        model = fuse(model, shared=m.sync_batchnorm)
    elif m.sync_batchnorm and place.world_size > 1:
        from fastsuncet.models.sync_batchnorm import synchronize

        model = synchronize(model)
    layout = torch.channels_last if config.meta.channels_last else torch.preserve_format
    # Torch's stubs lack memory_format.
    model = model.to(place.device, memory_format=layout)  # pyright: ignore[reportCallIssue]
    method = StepMethod(config, model, place.device, per_class)
    optimizer = build_optimizer(config.optimization, model, method.lr)

    micro_batch, compiled = config.criterion.micro_batch, config.meta.compile
    images, labeled = (sizes.local_unlabeled, sizes.local_labeled) if sizes else (2, 2)
    if not compiled:  # torch.compile makes a graph for each shape, in minutes
        images, labeled = min(images, 2), min(labeled, 2)

    def blank(network: nn.Module) -> torch.Tensor:
        def zeros(count: int, size: int) -> torch.Tensor:
            return torch.zeros(count, 3, size, size, device=place.device)

        unlabeled = tuple(zeros(images, view.size) for view in views(config))
        with method.autocast():
            out = network(unlabeled, zeros(labeled, config.data.augmentation.size))
        return sum((x.float().sum() for x in out if x is not None), torch.zeros((), device=place.device))

    whole = PiecewiseModel(model, micro_batch // place.world_size) if micro_batch else MultiViewModel(model)
    if not compiled and place.world_size == 1:
        return model, whole, optimizer, method
    from fastsuncet.distributed.ddp import parallel

    network = parallel(whole, place, compiled=compiled, static_graph=True, blank_pass=blank)
    return model, network, optimizer, method


def require_norm(config: Config, sizes: Arithmetic) -> None:
    """Raise ConfigErrors where a process has one image of a size, and BatchNorm so one value a channel."""
    ranks = sizes.world_size
    shared = config.model.sync_batchnorm and ranks > 1
    if shared or not any(math.prod(shape) == shape[1] for shape in norm_shapes(config, sizes)):
        return
    key, text = "model.sync_batchnorm", f"true where each of {ranks} processes has one image of a size"
    if ranks == 1:  # only labels alone: an unlabeled image has two views, and a batch two images
        key = "criterion.supervised_imgs_per_class"
        text = "2 or more, or criterion.classes_per_batch, in a run on labels alone"
    raise config.error(key, f"must be {text}: BatchNorm needs two")


def build_optimizer(o: OptimizationSection, model: nn.Module, lr: torch.Tensor) -> DeviceLR:
    """Return optimization.optimizer of the trainable parameters; `lr` is filled by `set_lr`."""
    groups = parameter_groups(model, exclude_bias_and_norm=o.exclude_bias_and_norm)
    shared = {"momentum": o.momentum, "weight_decay": o.weight_decay}
    if o.optimizer == "lars":
        lars = {"trust_coefficient": o.trust_coefficient, "lr_in_momentum": o.lr_in_momentum}
        return LARS(groups, lr, **shared, **lars, nesterov=o.nesterov)
    for group in groups:
        group.pop("lars", None)  # LARS' own
    if o.optimizer == "sgd":
        return SGD(groups, lr, **shared, nesterov=o.nesterov)
    return AdamW(groups, lr, **shared)
