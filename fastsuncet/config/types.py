"""The types of a config's values: what pydantic checks, and in words what is allowed ("must be ...").

Values are read from JSON in pydantic's strict mode: `epochs: true` is not 1, `lr: "fast"` is not a number, and a list
becomes a tuple, so that a frozen config cannot change anywhere.
"""

import math
import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from pipelines.sampling.augmentation import Allowed, AreaShares, Probability

__all__ = ["AreaShares", "Probability"]


class Section(BaseModel):
    """A section of a config: frozen, strict, and without keys nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Count = Annotated[int, Allowed(lambda n: 1 <= n < 2**31, "a whole number, 1 or more")]
CountOrZero = Annotated[int, Allowed(lambda n: 0 <= n < 2**31, "a whole number, 0 or more")]
Seed = Annotated[int, Allowed(lambda n: 0 <= n < 2**63, "a whole number from 0 to 2^63 - 1")]


class PerRank(Section):
    """A count that each process has, whatever their number."""

    per_rank: Count


Images = CountOrZero | PerRank
BatchSize = Annotated[
    Images, Allowed(lambda _: True, "a whole number of images over all processes, or {per_rank: N}")
]
ImagesPerClass = Annotated[
    Images,
    Allowed(lambda _: True, "a whole number of images over all processes (0 or more), or {per_rank: N}"),
]
Epochs = Annotated[
    CountOrZero | Literal["all", "plateau"],
    Allowed(lambda _: True, "a whole number of epochs, 0 or more, or all or plateau"),
]

Positive = Annotated[float, Allowed(lambda x: 0 < x < math.inf, "a number above 0")]
NotNegative = Annotated[float, Allowed(lambda x: 0 <= x < math.inf, "a number, 0 or more")]
Share = Annotated[float, Allowed(lambda x: 0 < x <= 1, "a share above 0 and up to 1, such as 0.1")]
ShareOrZero = Annotated[float, Allowed(lambda x: 0 <= x <= 1, "a share from 0 to 1, such as 0.75")]
Momentum = Annotated[float, Allowed(lambda x: 0 <= x < 1, "a number from 0 to below 1")]
Numbers = Annotated[
    tuple[NotNegative, ...], Allowed(bool, "a list of numbers, 0 or more, such as [0.001, 0.01]")
]
Datasets = Annotated[
    tuple[Literal["cifar10", "cifar100", "voc07"], ...],
    Allowed(bool, "a list of cifar10, cifar100 and voc07"),
]

Switch = Annotated[bool, Allowed(lambda _: True, "true or false")]


def _matches(pattern: str, words: str) -> Allowed:
    return Allowed(lambda text: re.fullmatch(pattern, text) is not None, words)


Text = Annotated[str, _matches(r"[^\x00-\x1f]{1,4096}", "text, not empty and without control characters")]
Sha256 = Annotated[str, _matches("[0-9a-f]{64}", "64 hexadecimal digits in small letters")]
# A run's name becomes a folder's: it cannot climb out of `logging.folder`, hide, or look like an option.
Name = Annotated[
    str,
    _matches(
        r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}",
        "a name of up to 100 letters, digits and . _ - that begins with a letter, a digit or _",
    ),
]
Below = Annotated[
    Text,
    _matches(
        r"(?!/|~)(?!(?:.*/)?\.\.(?:/|$))[^\\]*",
        "a folder below data.root, without a leading / and without ..",
    ),
]
