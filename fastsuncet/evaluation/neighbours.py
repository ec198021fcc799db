"""K nearest neighbours: what a representation knows, asked without training anything.

Shapes: N labeled support images, Q query images, E the width of the encoder's output, C classes.
"""

import torch
import torch.nn.functional as F


def knn_predict(
    queries: torch.Tensor,  # (Q, E) float - representations of the images to classify
    supports: torch.Tensor,  # (N, E) float - representations of the labeled images
    labels: torch.Tensor,  # (N,) int64 in [0, C)
    num_classes: int,
    *,
    k: int = 10,
    weighted: bool = False,
    chunk_size: int = 1024,
) -> torch.Tensor:
    """Predicted classes, (Q,) int64: the vote of the k supports of largest cosine similarity (paper appendix G).

    The paper leaves the vote open. Here each neighbour has one vote (`weighted=True`: its similarity), and a tie goes
    to the class whose voters are more similar in sum. Float32 whatever the input; no gradient. k larger than N is N.
    """
    queries = F.normalize(queries.detach().float(), dim=1)
    supports = F.normalize(supports.detach().float(), dim=1)
    k = min(k, len(supports))
    predictions = []
    for rows in queries.split(chunk_size):  # a chunk at a time: Q x N similarities of ImageNet would be 25 GB
        similarity, nearest = (rows @ supports.T).topk(k, dim=1)  # (q, k)
        votes = F.one_hot(labels[nearest], num_classes).float()  # (q, k, C)
        similar = (votes * similarity[..., None]).sum(1)  # (q, C)
        # A sum of k cosines stays within k, so scaled by 1/(4k) it can break a tie of whole votes and no more.
        score = similar if weighted else votes.sum(1) + similar / (4 * k)
        # Similarities below 0 would lose to the 0 of a class that has no neighbour at all.
        score = score.masked_fill(votes.sum(1) == 0, -torch.inf)
        predictions.append(score.argmax(1))
    return torch.cat(predictions) if predictions else labels.new_zeros(0)
