"""PAWS: a view takes its class from the labeled images near it, and must agree with the other view of its image.

B  unlabeled images of this rank    V  views of each    S  supports (labeled images)    W  ranks    M = W S
D  width of a row                   C  classes among the M supports

    p(q)  = sum_j softmax_j(cos(q, s_j) / temperature) y_j         y_j the smoothed one-hot label of support j
    rho(p) = p^(1/T) / sum_k p_k^(1/T)                             sharpened: T = 0.25

Written with plain operators, some images at a time. Where those are not all, nothing is kept of the (V B, M)
similarities: the backward pass computes them again (torch's checkpoint), which costs one product in six. me-max couples
all anchors, so it would take a second pass in any case. What is kept is p, (V B, C), and the targets, a fourth of that
with eight views.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastsuncet.distributed.collectives import Group, all_gather_rows, gather_rows
from fastsuncet.losses import checks
from fastsuncet.losses.contrast import LOWEST_TEMPERATURE, outside_autocast, unit_rows

# Anchors at a time. A product with few rows is slow: on a CPU 128 take 1.4 times as long as 512, and 1,024 no less. On
# a GPU every chunk costs launches: for 8,192 anchors an H200 took 27.9 ms by 1,024 and 3.5 at once (0.04 and 0.22 GB).
ROWS_PER_CHUNK, ROWS_PER_CHUNK_ON_CUDA = 512, 8192
LARGE_VIEWS = 2  # those that have targets of their own
LOWEST_TARGET = 1e-4  # smaller entries of a target become 0, as in the authors' code


def paws(
    anchors: Tensor,
    supports: Tensor,
    labels: Tensor,
    targets: Tensor,
    target_supports: Tensor,
    *,
    views: int,
    temperature: float = 0.1,
    sharpen: float = 0.25,
    smoothing: float = 0.1,
    prior: Tensor | None = None,
    classes: int | None = None,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Compute both terms of PAWS (arXiv 2104.13963, section 3; facebookresearch/suncet 731547d). The loss is their sum.

        cross_entropy = mean over anchors a of  - sum_k t_ak log p_k(a)
        me_max        = sum_k m_k log m_k       with m = mean over the anchors of all ranks of rho(p(a))

    The target t of a large view is rho(p) of its row of `targets`, that of a small one the mean of its image's two;
    entries below 1e-4 become 0. The columns k are the classes among the supports of all ranks.

    Args:
        anchors: (V B, D) floating: view 0 of B images, then view 1 of the same images in the same order, and so on.
            The first two views are the large ones. Rows are normalized here, as those of `suncet`. All ranks pass the
            same shape; B = 0 gives 0.
        supports: (S, D) floating, at least one row. All ranks pass the same shape.
        labels: (S,) integers of any value, which mean the same on all ranks.
        targets: (2 B, D) floating: row b is the target of anchor row b, so the caller swaps the two large views.
        target_supports: (S, D) floating, of the images of `supports`.
        views: V, at least 2; PAWS's is 8, two large and six small.
        temperature: above 0; PAWS's is 0.1.
        sharpen: T, above 0 and up to 1; PAWS's is 0.25.
        smoothing: of the supports' labels, from 0 to below 1; PAWS's is 0.1.
        prior: (S,) floating above 0, not checked: 0 gives inf. The wanted share of each support's class, in any
            unit; it is scaled to sum to 1 over the classes of the step. me_max then is
            sum_k m_k log(m_k / (C prior_k)). None: all classes alike.
        classes: C, or more: how many columns there are. None: a CPU counts the classes; on a GPU the host would have to
            wait for the count, so there are as many columns as supports, at the price of a wider product.
        group: the ranks whose images are taken together; None for the default one, or this process alone.

    Returns:
        Two scalars, float32 (float64 for float64 `anchors`), also under autocast. The cross-entropy is this rank's mean
        and me_max that of all ranks. The mean over ranks is the loss of one process on the joined batch.

    Gradient: to `anchors` and `supports`, none to the targets. Supports are gathered with gradient, so supports.grad is
    that of the SUM of all ranks' losses, and DDP's mean over ranks makes it that of one process on the joined batch.

    The host does not wait for the device. Memory is linear in the anchors: D numbers of each are kept, and C.

    Raises:
        ValueError: a shape or dtype does not fit, a setting is out of range, or the ranks' shapes differ.
        RuntimeError: there are more classes than `classes`; on a GPU, CUDA's device-side assert.
    """
    _check(anchors, supports, labels, targets, target_supports, views, temperature, sharpen, smoothing, prior)
    for rows in (anchors, supports):
        checks.equal_shapes("paws", rows, group)
    with outside_autocast(anchors.device.type):
        keys = gather_rows(unit_rows(supports), group)
        target_keys = all_gather_rows(unit_rows(target_supports), group)
        one_hot = _one_hot(all_gather_rows(labels.long().contiguous(), group), classes, keys)
        # The share of each class of the step; 0 in a column that stands for none.
        present = one_hot.any(dim=0)
        uniform = present.to(keys.dtype) / present.sum()
        rows = (1 - smoothing) * one_hot + smoothing * uniform
        tiny = torch.finfo(keys.dtype).tiny

        def p(queries: Tensor, keys: Tensor) -> Tensor:
            return torch.softmax(unit_rows(queries) / temperature @ keys.T, dim=1) @ rows

        def log(p: Tensor) -> Tensor:
            return p.clamp(min=tiny).log()

        def rho(log_p: Tensor) -> Tensor:
            return torch.softmax(log_p / sharpen, dim=1)

        def terms(p: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
            """Return the sums over b images, p (V b, C) and targets (2 b, C), of the cross-entropy and rho(p) (C,)."""
            small = large.unflatten(0, (LARGE_VIEWS, -1)).mean(0)
            target = torch.cat([large, *[small] * (views - LARGE_VIEWS)])
            target = target.masked_fill(target < LOWEST_TARGET, 0)
            log_p = log(p)
            return -(target * log_p).sum(), rho(log_p).sum(0)

        images = len(targets) // LARGE_VIEWS
        at_a_time = max(1, (ROWS_PER_CHUNK_ON_CUDA if anchors.is_cuda else ROWS_PER_CHUNK) // views)
        chunks = (
            x.unflatten(0, (count, images)).split(at_a_time, dim=1)
            for x, count in ((anchors, views), (targets, LARGE_VIEWS))
        )

        def light(function: Callable, *rows: Tensor) -> Any:
            """Keep only the result for the backward pass, where that saves memory: not with all images at once."""
            if images <= at_a_time:
                return function(*rows)
            return checkpoint(function, *rows, use_reentrant=False, preserve_rng_state=False)

        sums = []
        for anchor_rows, target_rows in zip(*chunks):
            with torch.no_grad():
                large = rho(log(p(target_rows.flatten(0, 1), target_keys)))
            sums.append(light(terms, light(p, anchor_rows.flatten(0, 1), keys), large))
        cross_entropy, mean = (torch.stack(parts).sum(0) / max(len(anchors), 1) for parts in zip(*sums))
        # Gathered with gradient, as supports are: each rank's part then has the gradient of all ranks' me_max.
        mean = gather_rows(mean[None], group).mean(0).clamp(min=tiny)
        me_max = mean * mean.log()
        if prior is not None:
            wanted = (one_hot * all_gather_rows(prior.to(uniform), group)[:, None]).amax(dim=0)
            me_max = me_max - mean * torch.where(present, wanted / wanted.sum() / uniform, 1).log()
        return cross_entropy, me_max.sum()


def _one_hot(labels: Tensor, classes: int | None, like: Tensor) -> Tensor:
    """Return (M, C) of the dtype of `like`: 1 where the label of a row is the class of a column, in ascending order."""
    in_order = labels.sort().values
    first = torch.searchsorted(in_order, in_order) == torch.arange(len(labels), device=labels.device)
    column = (first.cumsum(0) - 1)[torch.searchsorted(in_order, labels)]
    if classes is None:
        classes = len(labels) if labels.is_cuda else int(first.sum())
    else:
        checks.count("paws", "classes", classes, 1)
        too_many = f"paws: there are more classes than classes={classes} among the supports of all ranks"
        torch._assert_async((column < classes).all(), too_many)  # pyright: ignore[reportPrivateImportUsage]
    return like.new_zeros(len(labels), classes).scatter_(1, column[:, None], 1)


def _check(
    anchors, supports, labels, targets, target_supports, views, temperature, sharpen, smoothing, prior
):
    names = ("anchors", "supports", "targets", "target_supports")
    for name, rows in zip(names, (anchors, supports, targets, target_supports)):
        checks.matrix("paws", f"{name} must be (rows, width)", rows)
        kind, of_anchors = ((x.shape[1], x.device, x.dtype == torch.float64) for x in (rows, anchors))
        wanted = f"the width and device of anchors, {tuple(anchors.shape)} on {anchors.device}, and their precision"
        checks.require("paws", kind == of_anchors, f"{name} must have {wanted}", rows)
    checks.labels("paws", supports, labels)
    checks.positive("paws", temperature=temperature, sharpen=sharpen)
    checks.count("paws", "views", views, LARGE_VIEWS)
    images, rest = divmod(len(anchors), views)
    many = f"views={views} of the same images, view after view, and targets two"
    fits = not rest and len(targets) == LARGE_VIEWS * images
    checks.require("paws", fits, f"anchors must hold {many}", (len(anchors), len(targets)))
    fits = len(supports) > 0 and supports.shape == target_supports.shape
    wanted = f"target_supports must be of the images of supports, {tuple(supports.shape)}, at least one"
    checks.require("paws", fits, wanted, target_supports)
    checks.require("paws", sharpen <= 1, "sharpen must be at most 1", sharpen)
    checks.require("paws", 0 <= smoothing < 1, "smoothing must be from 0 to below 1", smoothing)
    # Else the probability of a far class would be 0.
    cold = smoothing == 0 and temperature < LOWEST_TEMPERATURE
    wanted = f"temperature must be at least {LOWEST_TEMPERATURE} without smoothing"
    checks.require("paws", not cold, wanted, temperature)
    is_share = isinstance(prior, Tensor) and prior.shape == labels.shape and prior.is_floating_point()
    wanted = f"prior must be one share per support, a floating tensor ({len(labels)},)"
    checks.require("paws", prior is None or is_share, wanted, prior)
