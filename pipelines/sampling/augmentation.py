"""All the randomness of an augmented view: its strengths (`Augmentation`) and its draw (`draw_view`).

Nothing below this file is random. A view is drawn from (seed, role, step, global row) by a counter-based generator and
given to DALI, or to torchvision, as plain arrays. So resuming is starting at step k, two back-ends can be compared on
the same numbers, and a global batch is the same however many ranks share it.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Predicate
from typing_extensions import Self

CROP_TRIES = 10  # torchvision's RandomResizedCrop gives up after ten boxes that do not fit
# 20 for the tries, 2 for the corner, 10 for the rest: whole blocks of Philox's four words. All are used, and another
# count would move every draw. A further number takes a stream of its own, a block of it for each row, so that a row's
# number is the same however the ranks cut the batch: `uniform(seed, f"{role} name", (first_row, 0, 0, step),
# 4 * len(sizes))[::4]`.
DRAWS_PER_ROW = 32
ORDERS = np.array(list(itertools.permutations(range(4))), np.int32)  # the first is the fixed one


@dataclass(frozen=True)
class Allowed(Predicate):
    """The check of a value, and in words what it must be. pydantic applies the check of an annotation with one."""

    words: str  # to follow "must be"


Probability = Annotated[float, Allowed(lambda x: 0 <= x <= 1, "a probability from 0 to 1")]
Amount = Annotated[float, Allowed(lambda x: 0 <= x <= 10, "a number from 0 to 10")]
AreaShares = Annotated[
    tuple[float, float],
    Allowed(lambda p: 0 < p[0] <= p[1] <= 1, "shares of the area [low, high] with 0 < low <= high <= 1"),
]
Range = Annotated[
    tuple[float, float],
    Allowed(lambda p: 0.001 <= p[0] <= p[1] <= 1000, "numbers [low, high] with 0.001 <= low <= high <= 1000"),
]
Pixels = Annotated[int, Allowed(lambda n: 1 <= n <= 2048, "a whole number from 1 to 2,048")]
Strength = Annotated[float, Allowed(lambda x: 0 <= x <= 2.5, "a number from 0 to 2.5")]
Turns = Annotated[float, Allowed(lambda x: 0 <= x <= 0.5, "a number of turns from 0 to 0.5")]
Order = Annotated[Literal["fixed", "random"], Allowed(lambda o: o in ("fixed", "random"), "fixed or random")]
Window = Annotated[
    Literal["auto"] | int,
    Allowed(lambda w: w == "auto" or w in range(1, 1000, 2), "auto, or an odd number of pixels below 1000"),
]
Color = tuple[float, float, float]
Mean = Annotated[
    Color, Allowed(lambda c: all(0 <= x <= 1 for x in c), "numbers [red, green, blue] from 0 to 1")
]
Deviation = Annotated[
    Color, Allowed(lambda c: all(0.001 <= x <= 1 for x in c), "numbers [red, green, blue] from 0.001 to 1")
]


def setting(default: Any, description: str) -> Any:
    """Return a dataclass field with a default and its meaning, which the config's schema shows."""
    return field(default=default, metadata={"description": description})


class SettingsConflict(ValueError):
    """Two valid settings of an augmentation that do not fit each other. `key` is the one to change."""

    def __init__(self, key: str, text: str):
        super().__init__(f"{key} {text}")
        self.key, self.text = key, text


@dataclass(frozen=True)
class Augmentation:
    """The settings of one view, in the order of its operations. The defaults are the paper's for ImageNet.

    The color jitter changes brightness, contrast and saturation by a factor uniform in [max(0, 1-x), 1+x], where x is
    `strength` times the setting, and turns the hue by an angle uniform in [-x, x] turns. All four apply to the same
    share `jitter` of the images, in an order that is drawn for each image, as torchvision does, or a fixed one.

    Raises SettingsConflict. The config checks the ranges, not this class.
    """

    size: Pixels = setting(224, "side of the square view, in pixels")
    crop_scale: AreaShares = setting((0.08, 1.0), "area of the random crop, as a share of the image's")
    crop_ratio: Range = setting((3 / 4, 4 / 3), "width / height of the random crop")
    flip: Probability = setting(0.5, "probability of a left-right flip")
    jitter: Probability = setting(0.8, "probability that the color jitter below applies")
    strength: Strength = setting(1.0, "the paper's s: factor of the four color settings below")
    brightness: Amount = setting(0.8, "largest change of the brightness factor at strength 1")
    contrast: Amount = setting(0.8, "largest change of the contrast factor at strength 1")
    saturation: Amount = setting(0.8, "largest change of the saturation factor at strength 1")
    hue: Turns = setting(0.2, "largest change of the hue at strength 1, in turns")
    color_order: Order = setting(
        "random",
        "order of the four: random: drawn for each image, as torchvision does; fixed: brightness, contrast, "
        "saturation, hue",
    )
    gray: Probability = setting(0.2, "probability of a gray image")
    blur: Probability = setting(0.5, "probability of a Gaussian blur")
    blur_sigma: Range = setting((0.1, 2.0), "standard deviation of the blur, in pixels of the finished crop")
    blur_window: Window = setting(
        "auto",
        "width of the blur kernel, in pixels; auto: 2 * ceil(3 * sigma) + 1, on average within 0.03 gray levels of "
        "SimCLR's 23 at size 224",
    )
    mean: Mean = setting(
        (0.0, 0.0, 0.0), "subtracted from pixels in [0, 1]; the authors trained without normalization"
    )
    std: Deviation = setting((1.0, 1.0, 1.0), "divides pixels after the mean is subtracted")

    def __post_init__(self) -> None:
        if self.strength * self.hue > 0.5:
            turns = self.strength * self.hue
            raise SettingsConflict("hue", f"times strength is {turns:g} turns; half a turn is the most")
        if self.widest_blur // 2 >= self.size:
            # The border is mirrored once. A kernel that reaches past the mirror has no torchvision meaning.
            raise SettingsConflict(
                "blur_sigma" if self.blur_window == "auto" else "blur_window",
                f"asks for a blur {self.widest_blur} pixels wide, which does not fit a view of {self.size} pixels; "
                "make it smaller, or turn it off with blur: 0",
            )

    @property
    def widest_blur(self) -> int:
        """Pixels across the widest blur kernel of this augmentation, 0 without one."""
        window = self.blur_window if self.blur else 0
        return int(blur_windows(np.array(self.blur_sigma[1]))) if window == "auto" else window

    @property
    def uncolored(self) -> Self:
        """The same crops and flips, and nothing else."""
        return replace(self, jitter=0.0, gray=0.0, blur=0.0)

    @property
    def recolors(self) -> bool:
        """Whether any image of this view can have its colors changed, other than to gray."""
        strongest = max(self.brightness, self.contrast, self.saturation, self.hue)
        return self.jitter > 0 and self.strength * strongest > 0


@dataclass(frozen=True, eq=False)
class ViewParams:
    """What happens to each of B images in one view: arrays over rows, neutral where nothing is to happen."""

    box: np.ndarray  # (B, 4) int32: top, left, height, width, in pixels of the stored image
    flip: np.ndarray  # (B,) bool
    brightness: np.ndarray  # (B,) float32 factor, 1 = neutral
    contrast: np.ndarray  # (B,) float32 factor, 1 = neutral
    saturation: np.ndarray  # (B,) float32 factor, 1 = neutral
    hue: np.ndarray  # (B,) float32 turns, 0 = neutral
    # (B, 4) int32: which of the four factors above comes first, second ...; 0 is brightness.
    order: np.ndarray
    gray: np.ndarray  # (B,) bool
    sigma: np.ndarray  # (B,) float32 pixels, 0 = no blur


@dataclass(frozen=True)
class Center:
    """The evaluation view: torchvision's `Resize(resize)` of the shorter side, then `CenterCrop(size)`."""

    size: int = 224  # pixels, square
    resize: int = 256  # pixels, shorter side
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    upright: bool = True  # images are turned as their EXIF tag says; an index does it (`image_tree`)

    def __post_init__(self) -> None:
        """Raise ValueError for a crop that is larger than the resized image."""
        if not 0 < self.size <= self.resize:
            raise ValueError(f"the crop's size ({self.size}) is not within the shorter side ({self.resize})")


@dataclass(frozen=True, eq=False)
class CenterParams:
    """Where `Center` puts the pixels of each of B images: arrays over rows."""

    resized: np.ndarray  # (B, 2) int32: height, width after the resize
    corner: np.ndarray  # (B, 2) int32: top, left of the crop in the resized image


def uniform(seed: int, role: str, counter: tuple[int, int, int, int], count: int) -> np.ndarray:
    """Return `count` draws in [0, 1), float64, from any position of the stream of (seed, role); no state.

    `role` keeps streams apart (the order of the images, view 0, view 1, ...): a change to one does not change the
    others. `counter` is four 64-bit words, the first of which counts the blocks of four words drawn.
    """
    word = int.from_bytes(hashlib.blake2b(role.encode(), digest_size=8).digest(), "little")
    key, counter_words = np.array([seed, word], np.uint64), np.array(counter, np.uint64)
    # NumPy promises that Philox's raw words never change, but not what Generator.random makes of them.
    words = np.random.Philox(key=key, counter=counter_words).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


def draw_view(
    augmentation: Augmentation, sizes: np.ndarray, *, seed: int, step: int, role: str, first_row: int
) -> ViewParams:
    """Draw one view of the rows first_row, first_row + 1, ... of the global batch of `step`.

    `sizes` is (B, 2) int, the stored height and width of each row's image. Every row owns DRAWS_PER_ROW draws, used or
    not, so a row's view depends on its global row number alone, and the ranks' rows joined are one process's rows.
    """
    blocks = DRAWS_PER_ROW // 4
    draws = uniform(seed, role, (first_row * blocks, 0, 0, step), len(sizes) * DRAWS_PER_ROW)
    draws = draws.reshape(len(sizes), DRAWS_PER_ROW)
    tries, (top, left, *rest) = draws[:, : 2 * CROP_TRIES], draws[:, 2 * CROP_TRIES :].T
    flip, jitter, brightness, contrast, saturation, hue, gray, blur, sigma, order = rest
    jittered, turns = jitter < augmentation.jitter, augmentation.strength * augmentation.hue

    def where(chosen: np.ndarray, drawn: np.ndarray, neutral: float) -> np.ndarray:
        return np.where(chosen, drawn, neutral).astype(np.float32)

    def factor(draw: np.ndarray, amount: float) -> np.ndarray:
        amount *= augmentation.strength
        return where(jittered, between(draw, max(0.0, 1.0 - amount), 1.0 + amount), 1.0)

    return ViewParams(
        box=random_resized_crop(augmentation, np.asarray(sizes), tries, top, left),
        flip=flip < augmentation.flip,
        brightness=factor(brightness, augmentation.brightness),
        contrast=factor(contrast, augmentation.contrast),
        saturation=factor(saturation, augmentation.saturation),
        hue=where(jittered, between(hue, -turns, turns), 0.0),
        order=ORDERS[(order * len(ORDERS) * (augmentation.color_order == "random")).astype(int)],
        gray=gray < augmentation.gray,
        sigma=where(blur < augmentation.blur, between(sigma, *augmentation.blur_sigma), 0.0),
    )


def between(draws: np.ndarray, low: float, high: float) -> np.ndarray:
    """Stretch draws in [0, 1) to [low, high)."""
    return low + (high - low) * draws


def random_resized_crop(
    augmentation: Augmentation, sizes: np.ndarray, tries: np.ndarray, top: np.ndarray, left: np.ndarray
) -> np.ndarray:
    """Return torchvision's `RandomResizedCrop.get_params` for B images: (B, 4) int32 top, left, height, width.

    `tries` is (B, 20) uniform draws, an area and a log-ratio for each of ten boxes; the first that fits the image is
    taken. All ten are always drawn, because rejection must not shift what later rows draw. If none fits, the largest
    centered box of an allowed ratio is taken, as torchvision does. An image without a size gets a box of one pixel.
    """
    heights, widths = np.maximum(sizes, 1).astype(np.float64).T
    area = (heights * widths)[:, None] * between(tries[:, 0::2], *augmentation.crop_scale)  # (B, 10)
    narrow, wide = augmentation.crop_ratio
    ratio = np.exp(between(tries[:, 1::2], math.log(narrow), math.log(wide)))
    width = np.rint(np.sqrt(area * ratio))  # rint and Python's round agree: halves go to even
    height = np.rint(np.sqrt(area / ratio))
    fits = (width > 0) & (width <= widths[:, None]) & (height > 0) & (height <= heights[:, None])
    first, rows = fits.argmax(1), np.arange(len(sizes))
    found = fits[rows, first]

    image_ratio = widths / heights
    # At least a pixel, which an image of few pixels and a crop_ratio far from 1 would not leave.
    fallback_height = np.where(image_ratio < narrow, np.maximum(np.rint(widths / narrow), 1), heights)
    fallback_width = np.where(image_ratio > wide, np.maximum(np.rint(heights * wide), 1), widths)
    height = np.where(found, height[rows, first], fallback_height)
    width = np.where(found, width[rows, first], fallback_width)
    top = np.where(found, np.floor(top * (heights - height + 1)), (heights - height) // 2)
    left = np.where(found, np.floor(left * (widths - width + 1)), (widths - width) // 2)
    return np.stack([top, left, height, width], 1).astype(np.int32)


def center_view(center: Center, sizes: np.ndarray) -> CenterParams:
    """Return the evaluation view of B images whose stored heights and widths are `sizes`, (B, 2) int.

    Two roundings decide whether an evaluation agrees with torchvision's: the long side is truncated, and half an odd
    margin is rounded to even. A library's own "shorter side" and "center" differ in both, by 4.6 gray levels on
    average.
    """
    sizes = np.maximum(np.asarray(sizes, np.int64), 1)
    resized = center.resize * sizes // sizes.min(1, keepdims=True)
    half, odd = np.divmod(resized - center.size, 2)
    corner = half + odd * (half % 2)
    return CenterParams(resized.astype(np.int32), corner.astype(np.int32))


def blur_windows(sigma: np.ndarray) -> np.ndarray:
    """Return the pixels across a Gaussian kernel that holds three standard deviations on each side."""
    return 2 * np.ceil(3 * sigma).astype(np.int64) + 1
