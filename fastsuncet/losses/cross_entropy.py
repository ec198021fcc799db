"""Cross-entropy of a linear classifier on labeled images: the paper's parametric alternative to SuNCEt.

N  labeled rows of this rank        C  classes
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsuncet.distributed.collectives import Group
from fastsuncet.losses.checks_and_weights import check_labels, require_equal_shapes

NO_LABEL = torch.iinfo(torch.int64).min


def cross_entropy(logits: Tensor, labels: Tensor, *, group: Group = None) -> Tensor:
    """mean_i -log softmax(logits_i)[label_i] over the rows of this rank (section 4.1 and appendix F of the
    paper).

    Args:
        logits: (N, C) floating, the classifier's output, no softmax. All ranks bring the same shape.
        labels: (N,) integers 0 ... C - 1 on the same device. Whether they are is known to the device only:
            on a CPU torch's own IndexError says so, on a GPU its device-side assertion.
        group: the ranks whose mean this is a share of; None for the default one, or this process alone.

    Returns:
        A scalar, float32 (float64 for float64 `logits`), also under autocast: the mean over this rank's
        rows. The mean over ranks is the loss of one process on the joined batch. N = 0 gives 0 with a zero
        gradient.

    Gradient: to this rank's logits only; DDP's mean over ranks makes it that of one process on the joined
    batch.

    Raises:
        ValueError: a shape or dtype does not fit, or the ranks bring different shapes.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            "cross_entropy: logits must be (rows, classes) of a floating dtype, "
            f"not {tuple(logits.shape)} of {logits.dtype}"
        )
    check_labels("cross_entropy", logits, labels)
    require_equal_shapes("cross_entropy", logits, group)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # torch's own mean over no rows is 0/0, and by default it passes over the label -100 without a word.
    total = F.cross_entropy(logits, labels.long(), reduction="sum", ignore_index=NO_LABEL)
    return total / max(len(logits), 1)
