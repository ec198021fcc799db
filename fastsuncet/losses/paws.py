"""PAWS: a view takes its class from the labeled images near it, and must agree with the other view of its image.

B  unlabeled images of this rank    V  views of each    S  supports (labeled images)    W  ranks    M = W S
D  width of a row                   C  classes among the M supports

    p(q)  = sum_j softmax_j(cos(q, s_j) / temperature) y_j         y_j the smoothed one-hot label of support j
    rho(p) = p^(1/T) / sum_k p_k^(1/T)                             sharpened: T = 0.25

Written with plain operators. Of the (V B, M) probabilities only those of some images exist at a time: the backward pass
computes them again (torch's checkpoint). That costs a product more, and me-max couples all anchors, so it would take
a second pass in any case.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastsuncet.distributed.collectives import Group, all_gather_rows, gather_rows
from fastsuncet.losses.checks import (
    check_labels,
    check_matrix,
    check_positive,
    check_temperature,
    require_equal_shapes,
)
from fastsuncet.losses.contrast import ROWS_PER_CHUNK, ROWS_PER_CHUNK_ON_CUDA, outside_autocast, unit_rows
from fastsuncet.losses.contrast_symmetric import LOWEST_TEMPERATURE

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
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Compute both terms of PAWS (arXiv 2104.13963, section 3; facebookresearch/suncet 731547d). The loss is their sum.

        cross_entropy = mean over anchors a of  - sum_k t_ak log p_k(a)
        me_max        = sum_k m_k log m_k       with m = mean over the anchors of all ranks of rho(p(a))

    The target t of a large view is rho(p) of its row of `targets`, that of a small one the mean of its image's two;
    entries below 1e-4 become 0. The columns k are the classes among the supports of all ranks.

    Args:
        anchors: (V B, D) floating: view 0 of B images, then view 1 of the same images in the same order, and so on.
            The first two views are the large ones. Rows of any length, they are normalized here. All ranks pass the
            same shape; B = 0 gives 0.
        supports: (S, D) floating, at least one row. All ranks pass the same shape.
        labels: (S,) integers of any value, which mean the same on all ranks.
        targets: (2 B, D) floating: row b is the target of anchor row b, so the caller swaps the two large views.
        target_supports: (S, D) floating, of the images of `supports`.
        views: V, at least 2; PAWS's is 8, two large and six small.
        temperature: above 0; PAWS's is 0.1.
        sharpen: T, above 0 and up to 1; PAWS's is 0.25.
        smoothing: of the supports' labels, from 0 to below 1; PAWS's is 0.1.
        prior: (S,) floating above 0, the wanted share of each support's class, in any unit; it is scaled to sum to 1
            over the classes of the step. me_max then is sum_k m_k log(m_k / (C prior_k)). None: all classes alike.
        group: the ranks whose images are taken together; None for the default one, or this process alone.

    Returns:
        Two scalars, float32 (float64 for float64 `anchors`), also under autocast. The cross-entropy is this rank's mean
        and me_max that of all ranks. The mean over ranks is the loss of one process on the joined batch.

    Gradient: to `anchors` and `supports`, none to the targets. Supports are gathered with gradient, so supports.grad is
    that of the SUM of all ranks' losses, and DDP's mean over ranks makes it that of one process on the joined batch.

    The host does not wait for the device. Memory is linear in the anchors.

    Raises:
        ValueError: a shape or dtype does not fit, a setting is out of range, or the ranks' shapes differ.
    """
    _check(anchors, supports, labels, targets, target_supports, views, temperature, sharpen, smoothing, prior)
    for rows in (anchors, supports):
        require_equal_shapes("paws", rows, group)
    with outside_autocast(anchors.device.type):
        keys = gather_rows(unit_rows(supports), group)
        target_keys = all_gather_rows(unit_rows(target_supports), group)
        column, present = _columns(all_gather_rows(labels.long().contiguous(), group))
        # The share of each class of the step; 0 in a column that stands for none.
        uniform = present.to(keys.dtype) / present.sum()
        tiny = torch.finfo(keys.dtype).tiny

        def log_p(queries: Tensor, keys: Tensor) -> Tensor:
            nearest = torch.softmax(unit_rows(queries) @ keys.T / temperature, dim=1)
            by_class = torch.zeros_like(nearest).index_add(1, column, nearest)
            return ((1 - smoothing) * by_class + smoothing * uniform).clamp(min=tiny).log()

        def rho(log_p: Tensor) -> Tensor:
            return torch.softmax(log_p / sharpen, dim=1)

        def of_images(anchors: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            """Return the sums over the views (V, b, D) of b images of the cross-entropy, and of rho(p) (M,)."""
            with torch.no_grad():
                large = rho(log_p(targets.flatten(0, 1), target_keys)).unflatten(0, targets.shape[:2])
                small = large.mean(0, keepdim=True).expand(views - LARGE_VIEWS, -1, -1)
                target = torch.cat([large, small]).flatten(0, 1)
                target.masked_fill_(target < LOWEST_TARGET, 0)
            predicted = log_p(anchors.flatten(0, 1), keys)
            return -(target * predicted).sum(), rho(predicted).sum(0)

        images = len(targets) // LARGE_VIEWS
        rows = ROWS_PER_CHUNK_ON_CUDA if anchors.is_cuda else ROWS_PER_CHUNK
        chunks = (
            x.unflatten(0, (count, images)).split(max(1, rows // views), dim=1)
            for x, count in ((anchors, views), (targets, LARGE_VIEWS))
        )
        sums = [
            checkpoint(of_images, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*chunks)
        ]
        cross_entropy, mean = (torch.stack(parts).sum(0) / max(len(anchors), 1) for parts in zip(*sums))
        # Gathered with gradient, as supports are: each rank's part then has the gradient of all ranks' me_max.
        mean = gather_rows(mean[None], group).mean(0).clamp(min=tiny)
        me_max = mean * mean.log()
        if prior is not None:
            wanted = torch.zeros_like(uniform).scatter(0, column, all_gather_rows(prior.to(uniform), group))
            me_max = me_max - mean * torch.where(present, wanted / wanted.sum() / uniform, 1).log()
        return cross_entropy, me_max.sum()


def _columns(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column (M,) of each support's class, and which columns (M,) stand for a class.

    A class has the column of its first place among the sorted labels. There are M columns because only the device knows
    how many classes there are.
    """
    in_order = labels.sort().values
    first = torch.searchsorted(in_order, in_order)
    return torch.searchsorted(in_order, labels), first == torch.arange(len(labels), device=labels.device)


def _check(
    anchors, supports, labels, targets, target_supports, views, temperature, sharpen, smoothing, prior
):
    names = ("anchors", "supports", "targets", "target_supports")
    for name, rows in zip(names, (anchors, supports, targets, target_supports)):
        check_matrix("paws", f"{name} must be (rows, width)", rows)
    check_labels("paws", supports, labels)
    check_temperature("paws", temperature)
    check_positive("paws", "sharpen", sharpen, "PAWS uses 0.25")
    if views < LARGE_VIEWS:
        raise ValueError(f"paws: views must be at least 2, because one predicts the other, not {views}")
    if len(anchors) % views or len(targets) * views != len(anchors) * LARGE_VIEWS:
        raise ValueError(
            f"paws: anchors must hold {views} views of the same images, view after view, and targets two; "
            f"they have {len(anchors)} and {len(targets)} rows"
        )
    if len(supports) == 0 or supports.shape != target_supports.shape:
        raise ValueError(
            "paws: supports and target_supports must be of the same images, at least one; they are "
            f"{tuple(supports.shape)} and {tuple(target_supports.shape)}"
        )
    if sharpen > 1:
        raise ValueError(f"paws: sharpen must be at most 1, not {sharpen}; PAWS uses 0.25")
    if not 0 <= smoothing < 1:
        raise ValueError(f"paws: smoothing must be from 0 to below 1, not {smoothing!r}; PAWS uses 0.1")
    if smoothing == 0 and temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"paws: without smoothing, temperature must be at least {LOWEST_TEMPERATURE}, not {temperature}: the "
            "probability of a far class would be 0"
        )
    if prior is not None and prior.shape != labels.shape:
        raise ValueError(
            f"paws: prior must be one share per support, ({len(labels)},), not {tuple(prior.shape)}"
        )
