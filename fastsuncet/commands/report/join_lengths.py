"""Runs of several lengths as one curve, as the paper draws ImageNet.

There each length is a run of its own, because the learning rate ends with it, and only its last checkpoint counts.
"""

from dataclasses import replace

from fastsuncet.commands.report.curves import Curve

LENGTHS = ("optimization.epochs", "optimization.steps")


def join_lengths(curves: list[Curve]) -> list[Curve]:
    """Curves of runs that only their length sets apart, joined: a point a run, its last. Others stay as they are.

    Runs of one seed are joined with each other; seeds are averaged afterwards, as ever.
    """
    families: dict[tuple, list[Curve]] = {}
    for curve in curves:
        rest = tuple((key, value) for key, value in curve.settings if key not in LENGTHS)
        families.setdefault((curve.method, curve.seed, curve.evaluation, rest), []).append(curve)
    joined = []
    for (*_, rest), family in families.items():
        if len({curve.settings for curve in family}) == 1:  # one length, or its twins
            joined += family
            continue
        ends = sorted((curve.points[-1] for curve in family), key=lambda point: point.step or 0)
        longest = max(family, key=lambda curve: curve.points[-1].step or 0)
        joined.append(replace(longest, points=tuple(ends), settings=rest))  # under the longest one's name
    return joined
