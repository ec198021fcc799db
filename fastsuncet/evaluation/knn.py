"""K nearest neighbors: what the representations say about the classes, without training a classifier.

Shapes: N labeled support images, Q query images, E the width of the encoder's output.
"""

from collections.abc import Callable, Collection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import sum_over_ranks
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.features import outputs
from fastsuncet.metrics.rankme import CHUNK, rankme
from fastsuncet.models.resnet import Model
from pipelines.data_errors import BadImage, DataError

# Without labels, or with all, every image of known class can be a support. For ImageNet these are 1.28 million rows of
# 2,048 floats, 10.5 GB on each GPU in the middle of a run. 50,000 rows are 0.4 GB, and all of CIFAR-10.
MOST_SUPPORTS = 50_000
PAIRS = 1 << 24  # of neighbors of a chunk of queries, compared with each other at a time


def knn_predict(
    queries: Tensor,  # (Q, E) float - representations of the images to classify
    supports: Tensor,  # (N, E) float - representations of the labeled images
    labels: Tensor,  # (N,) int64
    *,
    k: int = 10,
    weighted: bool = False,
    chunk_size: int = 1024,
) -> Tensor:
    """Return the predicted classes, (Q,) int64: the vote of the k supports of largest cosine similarity (appendix G).

    The paper does not define the vote. Here each neighbor has one vote (`weighted=True`: its similarity), and a tie
    goes to the class with the larger sum of similarities, then to the lower one. Float32 for any input; no gradient.
    A k larger than N is N.
    """
    queries = F.normalize(queries.detach().float(), dim=1)
    supports = F.normalize(supports.detach().float(), dim=1)
    k = min(k, len(supports))
    predictions = []
    # In chunks: all Q x N similarities of ImageNet would be 25 GB.
    for rows in queries.split(max(1, min(chunk_size, PAIRS // k**2))):
        similarity, nearest = (rows @ supports.T).topk(k, dim=1)  # (q, k)
        near, similarity = labels[nearest], similarity.nan_to_num(0)
        # Each neighbor gets the votes of all of its class. Scores of all classes would be 2 GB for 10,000 of them.
        votes = (near[:, :, None] == near[:, None]).float()  # (q, k, k)
        similar = (votes * similarity[:, None]).sum(2)  # (q, k)
        # A sum of k cosines is at most k, so that 1/(4k) of it can only break a tie of whole votes.
        score = similar if weighted else votes.sum(2) + similar / (4 * k)
        most = score == score.amax(1, keepdim=True)
        predictions.append(near.masked_fill(~most, torch.iinfo(near.dtype).max).amin(1))
    return torch.cat(predictions)


def online_knn(
    model: Model,
    images: Images,
    config: Config,
    place: Place,
    bad: Collection[int] = (),  # the same on every rank
    before_batch: Callable[[], None] = lambda: None,  # of `outputs`
) -> dict[str, float]:
    """Return what is measured during training: the k-NN accuracy, and RankMe of the same validation images.

    "knn_accuracy" is the share of validation images that their k nearest training images classify correctly, and
    "knn_supports" the number of these: the labeled images of the run's split without those in `bad`, or without labels
    (SimCLR), or with all, up to MOST_SUPPORTS training images of known class. "rankme" is of the embeddings z, as in
    its paper, and "rankme_features" of the encoder's output h, which k-NN compares.

    Each validation image counts once on any number of ranks, and every rank returns the same numbers. Raises BadImage
    for an image that cannot be decoded.
    """
    chosen = images.split.indices
    if config.data.split.kind in ("none", "all"):
        chosen = spread_over_classes(images.train.labels, MOST_SUPPORTS)
    chosen = chosen[~np.isin(chosen, [*bad, *images.train.bad])]
    queries = np.arange(len(images.validation))
    rows = outputs(model.encoder, images.validation, queries, config, place, before_batch=before_batch)
    try:
        columns = outputs(model.encoder, images.train, chosen, config, place, before_batch=before_batch)
    except BadImage as error:
        raise DataError(
            f"{error}\nOr run `fastsuncet data check CONFIG`: k-NN leaves out what it finds"
        ) from error
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    truth = torch.from_numpy(images.validation.labels).to(place.device)
    mine = slice(place.rank, None, place.world_size)  # the ranks share the images
    predicted = knn_predict(rows[mine], columns, labels, k=config.evaluation.knn_k)
    accuracy = sum_over_ranks((predicted == truth[mine]).sum()).item() / len(truth)
    training = model.head.training
    model.head.eval()
    with torch.no_grad():
        z = torch.cat([model.head(part) for part in rows[mine].split(CHUNK)])
    model.head.train(training)
    return {
        "knn_accuracy": accuracy,
        "knn_supports": len(chosen),
        "rankme": rankme(z, len(truth)),
        "rankme_features": rankme(rows[mine], len(truth)),
    }


def spread_over_classes(labels: np.ndarray, most: int) -> np.ndarray:
    """Return the indices, ascending, of at most `most` images of known class, evenly spaced through each class.

    Every class keeps its share of the images to within one. Nothing is drawn at random: all evaluations of all runs on
    the same data take the same images. `labels` (N,) int64, negative where the class is not known.
    """
    known = np.flatnonzero(labels >= 0)
    if len(known) <= most:
        return known
    by_class = known[np.argsort(labels[known], kind="stable")]
    return np.sort(by_class[np.arange(most) * len(by_class) // most])
