"""Which images to label next: typical ones that differ from each other and from the labeled ones."""

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_CLUSTERS = 500  # as in TypiClust
NEIGHBORS = 20  # the same
SMALLEST = 5  # images of a cluster worth a label, the same
ROWS = 4096  # of a table of distances
ROUNDS = 30  # of k-means: later ones move few images


def typical(features: Tensor, labeled: Tensor, count: int, seed: int = 0) -> Tensor:
    """Return the numbers of `count` images to label, int64, the first first: TypiClust (arXiv 2202.02794).

    `features` (N, E), `labeled` (N,) bool. k-means makes as many clusters as there are labels in the end. The cluster
    with the fewest labels, of equal ones the largest, gives its most typical image: that with the nearest NEIGHBORS in
    its cluster. Clusters of fewer than SMALLEST images come after further images of the others, and images whose
    features equal those of a labeled or of an earlier one come last. Deterministic on a device.
    """
    x = F.normalize(features.float())
    clusters = min(int(labeled.sum()) + count, MOST_CLUSTERS, len(x))
    member = k_means(x, clusters, seed)
    # As lists: on a GPU the host would wait for each number.
    sizes, labels = (rows.bincount(minlength=clusters).tolist() for rows in (member, member[labeled]))
    left = {c: _by_typicality(x, member, labeled, c) for c in range(clusters)}
    same = x.unique(dim=0, return_inverse=True)[1].tolist()
    found: list[int] = []
    copies: list[int] = []
    taken = {same[i] for i in labeled.nonzero()[:, 0].tolist()}
    while len(found) < count and any(left.values()):
        # A cluster of few images is noise, and comes last.
        *_, cluster = min((sizes[c] < SMALLEST, labels[c], -sizes[c], c) for c in left if left[c])
        image = left[cluster].pop(0)
        if same[image] in taken:
            copies.append(image)
        else:
            taken.add(same[image])
            found.append(image)
            labels[cluster] += 1
    found += copies[: count - len(found)]
    return torch.tensor(found, dtype=torch.int64, device=x.device)


def k_means(x: Tensor, clusters: int, seed: int) -> Tensor:
    """Return the cluster of each row of `x` (N, E), (N,) int64: k-means++ from `seed`, then Lloyd's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(weights: Tensor) -> Tensor:
        return x[torch.multinomial(weights.double().cpu(), 1, generator=generator).to(x.device)]

    centers = draw(torch.ones(len(x)))
    nearest = (x - centers).square().sum(1)
    while len(centers) < clusters:
        # Where all rows that are left equal a center, any one will do.
        centers = torch.cat([centers, draw(nearest if nearest.any() else torch.ones(len(x)))])
        nearest = torch.minimum(nearest, (x - centers[-1]).square().sum(1))
    member = x.new_zeros(len(x), dtype=torch.int64)
    for _ in range(ROUNDS):
        moved = torch.cat([torch.cdist(rows, centers).argmin(1) for rows in x.split(ROWS)])
        if torch.equal(moved, member):
            break
        member = moved
        sums = torch.zeros_like(centers).index_add_(0, member, x)
        sizes = member.bincount(minlength=clusters)[:, None]
        centers = torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)
    return member


def _by_typicality(x: Tensor, member: Tensor, known: Tensor, cluster: int) -> list[int]:
    """Return the unlabeled rows of a cluster, the most typical first."""
    rows = (member == cluster).nonzero()[:, 0]
    own, near = x[rows], min(NEIGHBORS, len(rows) - 1) + 1  # itself among them, at 0
    means = [torch.cdist(part, own).topk(near, largest=False).values.sum(1) for part in own.split(ROWS)]
    ordered = rows[torch.cat(means).argsort(stable=True)] if len(rows) else rows
    return ordered[~known[ordered]].tolist()
