"""What frozen features give before a fine-tuning: the classifier that it starts from, and accuracies to beat.

Shapes: N labeled images, E the width of the encoder's output, C classes.
"""

import contextlib
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import broadcast
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.finetuning.fit import FineTuningStream, Frozen, measure_statistics
from fastsuncet.evaluation.knn import knn_predict
from fastsuncet.evaluation.linear import ROWS, choose_strength, fit_linear
from fastsuncet.evaluation.protocols import examples
from fastsuncet.evaluation.scoring import labeled, measured, share_right

# BatchNorm's statistics are stale where torch's initial 0 and 1 weigh more than this. After 10 updates they weigh a
# third, and |h|^2 of training crops was 18 times that with statistics of the crops (after 80 updates 1.07 times): the
# classifier of such features is wrong from the first update on, which has statistics of its batch.
STALE = 0.001


def measure_frozen(encoder: Encoder, images: Images, config: Config, place: Place, steps: int) -> Frozen:
    """Fit the linear classifier of the config's section linear, and measure it and k-NN on the validation images.

    Equal on all ranks. New statistics are those of the batches after the fine-tuning's `steps`. Collective.
    """
    network, stale = encoder.module.to(place.device), has_stale_statistics(encoder)
    chosen, count = labeled(images), len(images.train.classes)
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)

    def fitted(features: Tensor) -> tuple[Tensor, Tensor, float]:
        rows = features, labels, count
        strength, _ = choose_strength(*rows, config.linear.strength)
        fit = fit_linear(*rows, strength=strength, max_iterations=config.linear.max_iterations)
        return fit.weight.float(), fit.bias.float(), mean_square(features)

    accuracies, start = {}, None
    if images.held_out is not None:
        shown = examples(network, images, config, place, chosen=chosen)
        start = fitted(shown.features)
        scores = F.linear(shown.queries, *start[:2])
        accuracies["linear"] = measured(scores, shown.truth, {}).metrics["top1"]
        crops = outputs(network, images.train, chosen, config, place, crops=1)[:, 0]
        for name, supports in (("knn", shown.features), ("knn_random_crops", crops)):
            votes = knn_predict(shown.queries, supports, labels, k=config.evaluation.knn_k)
            accuracies[name] = share_right(votes, shown.truth)
    if stale:
        stream, network = FineTuningStream(images.train, chosen, config, place), copy.deepcopy(network)
        with contextlib.closing(stream):
            measure_statistics(network, stream, steps)
        for buffer in network.buffers():  # rank 0's on all ranks
            broadcast(buffer)
    if stale or start is None:
        start = fitted(outputs(network, images.train, chosen, config, place, what="labeled images"))
    return Frozen(network, stale, *start, accuracies)


def has_stale_statistics(encoder: Encoder) -> bool:
    """Return whether a run of so few updates trained the encoder that torch's initial statistics still weigh in it.

    Not in a run that started from weights (model.init), which have statistics of their own.
    """
    if encoder.step is None or encoder.trained is None or encoder.trained.model.init:
        return False
    norms = (x for x in encoder.module.modules() if isinstance(x, nn.modules.batchnorm._BatchNorm))
    updates = encoder.step + (encoder.tuned or 0)
    return any((1 - (norm.momentum or 0.1)) ** updates > STALE for norm in norms)


def mean_square(features: Tensor) -> float:
    """Return the mean of |h|^2 of features (N, E), in float64 and in pieces: two copies of ImageNet's are 42 GB."""
    return torch.cat([x.double().square().sum(1) for x in features.split(ROWS)]).mean().item()
