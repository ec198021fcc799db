"""When has the supervised loss plateaued? The paper looks at its curve and switches off (appendix E)."""

import math
from statistics import median


class PlateauRule:
    """Supervision goes off once the median loss of the last P epochs has, for P epochs, not come a share g below the
    lowest it had been; or once it is below a share g of the first epoch's, when there is nothing left to learn.

    `epochs` is P, at least 1; `gain` is g, in (0, 1]. Never before 2 P epochs.

    One epoch of few labels is noisy (5 % on the recorded curves of tests/data), so epochs are looked at P together, by
    their median: a spike is one epoch of many. The lowest, and for P epochs, so that one lucky stretch ends nothing.
    The share is of the loss itself: SuNCEt's has a floor above 0 that nobody knows beforehand, and close to it no such
    share is left to gain. Cross-entropy has none, and falls by a share for ever on images long known by heart: that is
    what the second half of the rule is for.

    The answer depends on the means alone, so ranks that are given the same ones agree.
    """

    def __init__(self, epochs: int, gain: float):
        self.epochs, self.gain = epochs, gain
        self._means: list[float] = []

    def add(self, mean: float) -> bool:
        """Takes the mean supervised loss of one more epoch. True: switch off from the next epoch on.

        A mean that is not finite is no news and is left out: whoever trains refuses such a loss and names its images.
        """
        if not math.isfinite(mean):
            return False
        self._means.append(mean)
        return self._plateaued()

    def _plateaued(self) -> bool:
        means, span = self._means, self.epochs
        if len(means) < 2 * span:
            return False
        smooth = [median(means[end - span : end]) for end in range(span, len(means) + 1)]
        stuck = min(smooth[-span:]) >= (1 - self.gain) * min(smooth[:-span])
        return stuck or smooth[-1] < self.gain * means[0]

    def state(self) -> list[float]:
        """The finite means so far, oldest first: all there is to keep, as JSON can say it."""
        return list(self._means)

    def restore(self, means: list[float]) -> None:
        """Continues as if `means`, of `state()`, had been added."""
        self._means = [float(mean) for mean in means]
