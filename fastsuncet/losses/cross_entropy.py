"""Cross-entropy of a linear classifier on labeled images: the paper's parametric alternative to SuNCEt.

N  labeled rows of this rank        C  classes
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsuncet.distributed.collectives import Group
from fastsuncet.losses import checks

NO_LABEL = torch.iinfo(torch.int64).min


def cross_entropy(logits: Tensor, labels: Tensor, *, group: Group = None) -> Tensor:
    """Compute mean_i -log softmax(logits_i)[label_i] over the rows of this rank (section 4.1 and appendix F).

    Args:
        logits: (N, C) floating, the classifier's output, no softmax. All ranks pass the same shape.
        labels: (N,) integers 0 ... C - 1 on the same device. Only the device can check the values:
            on a CPU torch raises its own IndexError, on a GPU a device-side assertion.
        group: the ranks whose mean this is a share of; None for the default one, or this process alone.

    Returns:
        A scalar, float32 (float64 for float64 `logits`), also under autocast; the mean over this rank's
        rows. The mean over ranks is the loss of one process on the joined batch. N = 0 gives 0 with a zero
        gradient.

    Gradient: to this rank's logits only; DDP's mean over ranks makes it that of one process on the joined
    batch.

    Raises:
        ValueError: a shape or dtype does not fit, or the ranks' shapes differ.
    """
    checks.matrix("cross_entropy", "logits must be (rows, classes)", logits)
    checks.labels("cross_entropy", logits, labels)
    checks.equal_shapes("cross_entropy", logits, group)
    # torch's own mean over no rows is 0/0, and by default it silently ignores the label -100.
    logits = checks.at_least_float32(logits)
    total = F.cross_entropy(logits, labels.long(), reduction="sum", ignore_index=NO_LABEL)
    return total / max(len(logits), 1)
