"""The types of a config's values: what pydantic checks, and beside it the same in words ("must be ...").

Strict throughout: `epochs: true` is not 1, and `lr: "fast"` is not a number. Lists become tuples, so that a
frozen config is frozen to the bottom.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Allowed:
    """What a value may be, in words that follow "must be"."""

    text: str


class Section(BaseModel):
    """A section of a config: frozen, strict, and without keys nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PerRank(Section):
    """A count that each process has, whatever their number."""

    per_rank: Annotated[int, Field(ge=1, lt=2**31)]


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError
    return pair


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError
    return number


def _below(folder: str) -> str:
    if folder.startswith(("/", "~")) or "\\" in folder or ".." in folder.split("/"):
        raise ValueError
    return folder


Count = Annotated[int, Field(ge=1, lt=2**31), Allowed("a whole number, 1 or more")]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31), Allowed("a whole number, 0 or more")]
Seed = Annotated[int, Field(ge=0, lt=2**63), Allowed("a whole number from 0 to 2^63 - 1")]
BatchSize = Annotated[
    CountOrZero | PerRank,
    Allowed("a whole number of images over all processes, or {per_rank: N}"),
]
ImagesPerClass = Annotated[
    CountOrZero | PerRank,
    Allowed("a whole number of images over all processes (0 or more), or {per_rank: N}"),
]
Epochs = Annotated[
    CountOrZero | Literal["all", "plateau"],
    Allowed("a whole number of epochs, 0 or more, or all or plateau"),
]
BlurWindow = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1, lt=1000), AfterValidator(_odd)],
    Allowed("auto, or an odd number of pixels below 1000"),
]

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0), Allowed("a number above 0")]
NotNegative = Annotated[Number, Field(ge=0), Allowed("a number, 0 or more")]
Probability = Annotated[Number, Field(ge=0, le=1), Allowed("a probability from 0 to 1")]
Share = Annotated[Number, Field(gt=0, le=1), Allowed("a share above 0 and up to 1, such as 0.1")]
ShareOrZero = Annotated[Number, Field(ge=0, le=1), Allowed("a share from 0 to 1, such as 0.75")]
Momentum = Annotated[Number, Field(ge=0, lt=1), Allowed("a number from 0 to below 1")]
# At 2.5 the hue turns by half a turn either way, which is all the way round.
Strength = Annotated[Number, Field(ge=0, le=2.5), Allowed("a number from 0 to 2.5")]

Shares = Annotated[
    tuple[Share, Share],
    Field(strict=False),  # a list will do
    AfterValidator(_ordered),
    Allowed("two shares of the image's area [low, high] with 0 < low <= high <= 1"),
]
Range = Annotated[
    tuple[Positive, Positive],
    Field(strict=False),
    AfterValidator(_ordered),
    Allowed("two numbers [low, high] with 0 < low <= high"),
]
Numbers = Annotated[
    tuple[NotNegative, ...],
    Field(strict=False, min_length=1),
    Allowed("a list of numbers, 0 or more, such as [0.001, 0.01]"),
]
Datasets = Annotated[
    tuple[Literal["cifar10", "cifar100", "voc07"], ...],
    Field(strict=False, min_length=1),
    Allowed("a list of cifar10, cifar100 and voc07"),
]
Mean = Annotated[
    tuple[Number, Number, Number],
    Field(strict=False),
    Allowed("three numbers [red, green, blue]"),
]
Std = Annotated[
    tuple[Positive, Positive, Positive],
    Field(strict=False),
    Allowed("three numbers above 0 [red, green, blue]"),
]

Switch = Annotated[bool, Allowed("true or false")]
Text = Annotated[
    str,
    Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$"),
    Allowed("text, not empty and without control characters"),
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), Allowed("64 hexadecimal digits in small letters")]
# A run's name becomes a folder's: it cannot climb out of `logging.folder`, hide, or look like an option.
Name = Annotated[
    str,
    Field(max_length=100, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"),
    Allowed("a name of up to 100 letters, digits and . _ - that begins with a letter, a digit or _"),
]
Below = Annotated[
    Text,
    AfterValidator(_below),
    Allowed("a folder below data.root, without a leading / and without .."),
]
