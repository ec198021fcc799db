"""All the chance there is in an augmented view: its strengths (`Augmentation`) and its draw (`draw_view`).

Nothing below this file is random. A view is drawn from (seed, role, step, global row) by a counter-based
generator and handed to DALI, or to the torchvision twin, as plain arrays. So resuming is starting at step k,
two back-ends can be held against each other on the same numbers, and a global batch is the same one however
many ranks share it.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

CROP_TRIES = 10  # torchvision's RandomResizedCrop gives up after ten boxes that do not fit
DRAWS_PER_ROW = (
    32  # 20 for the tries, 2 for the corner, 9 for the rest, 1 spare: whole blocks of Philox's four words
)


@dataclass(frozen=True)
class Augmentation:
    """The strengths of one view. The defaults are the paper's ImageNet recipe with colour strength s = 1.

    A colour strength x means a factor uniform in [max(0, 1-x), 1+x] (brightness, contrast, saturation) or a
    rotation uniform in [-x, x] turns (hue), applied to a share `jitter` of the images in this fixed order.
    torchvision draws the order per image; a fixed one costs a batched pipeline nothing and is the one
    documented difference of recipe.
    """

    size: int = 224  # pixels, square
    crop_scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height
    flip: float = 0.5  # probability
    jitter: float = 0.8  # probability that the four colour factors below apply at all
    brightness: float = 0.8
    contrast: float = 0.8
    saturation: float = 0.8
    hue: float = 0.2  # turns
    grey: float = 0.2  # probability
    blur: float = 0.5  # probability
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # pixels of the finished crop
    blur_window: int | None = (
        None  # None: 2*ceil(3*sigma) + 1, which differs by < 0.03 grey levels from a fixed 23
    )
    color: str = "exact"  # "exact": torchvision's contrast and hue; "fast": one linear twist (see color.py)
    mean: tuple[float, float, float] = (
        0.0,
        0.0,
        0.0,
    )  # of pixels in [0, 1]; the recipe trains without normalisation
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        """Raises ValueError in words for a strength that no image could be drawn with."""
        for name in ("flip", "jitter", "grey", "blur"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability between 0 and 1, not {getattr(self, name)}")
        for name in ("brightness", "contrast", "saturation"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a strength of 0 or more, not {getattr(self, name)}")
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} is a range (low, high) with 0 < low <= high, not {(low, high)}")
        if self.size < 1:
            raise ValueError(f"size is a number of pixels of 1 or more, not {self.size}")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"hue is in turns, between 0 and 0.5, not {self.hue}")
        if self.color not in ("exact", "fast"):
            raise ValueError(f'color is "exact" or "fast", not {self.color!r}')
        if min(self.std) <= 0:
            raise ValueError(f"std is three numbers above 0, not {self.std}")
        if self.blur_window is not None and (self.blur_window < 1 or self.blur_window % 2 == 0):
            raise ValueError(f"blur_window is an odd number of pixels or None, not {self.blur_window}")
        if self.blur and self.widest_blur // 2 >= self.size:
            # The border is mirrored once; a kernel that reaches past the mirror has no torchvision meaning.
            raise ValueError(
                f"a blur {self.widest_blur} pixels wide does not fit an image of {self.size} pixels"
            )

    @property
    def widest_blur(self) -> int:
        """Pixels across the widest blur kernel this augmentation can ask for."""
        return self.blur_window or int(blur_windows(np.array(self.blur_sigma[1])))

    @property
    def recolors(self) -> bool:
        """Whether any image of this view can have its colours changed, other than to grey."""
        return self.jitter > 0 and max(self.brightness, self.contrast, self.saturation, self.hue) > 0


@dataclass(frozen=True, eq=False)
class ViewParams:
    """What happens to each of B images in one view: arrays over rows, neutral where nothing is to happen."""

    box: np.ndarray  # (B, 4) int32: top, left, height, width, in pixels of the stored image
    flip: np.ndarray  # (B,) bool
    brightness: np.ndarray  # (B,) float32 factor, 1 = neutral
    contrast: np.ndarray  # (B,) float32 factor, 1 = neutral
    saturation: np.ndarray  # (B,) float32 factor, 1 = neutral
    hue: np.ndarray  # (B,) float32 turns, 0 = neutral
    grey: np.ndarray  # (B,) bool
    sigma: np.ndarray  # (B,) float32 pixels, 0 = no blur

    def __len__(self) -> int:
        return len(self.box)


@dataclass(frozen=True)
class Center:
    """The evaluation view: torchvision's `Resize(resize)` of the shorter side, then `CenterCrop(size)`."""

    size: int = 224  # pixels, square
    resize: int = 256  # pixels, shorter side
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        """Raises ValueError for a crop that would need a border invented around the image."""
        if not 0 < self.size <= self.resize:
            raise ValueError(f"the crop's size ({self.size}) is not within the shorter side ({self.resize})")


@dataclass(frozen=True, eq=False)
class CenterParams:
    """Where `Center` puts the pixels of each of B images: arrays over rows."""

    resized: np.ndarray  # (B, 2) int32: height, width after the resize
    corner: np.ndarray  # (B, 2) int32: top, left of the crop in the resized image

    def __len__(self) -> int:
        return len(self.resized)


def uniform(seed: int, role: int | str, counter: tuple[int, int, int, int], count: int) -> np.ndarray:
    """`count` draws in [0, 1), float64, from any place of the stream that (seed, role) names; no state.

    `role` keeps streams apart (the order of the images, view 0, view 1, ...): a change to one leaves the
    others untouched. `counter` is four 64-bit words, the first of which counts the blocks of four words
    drawn.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"a seed is a whole number from 0 to 2**64 - 1, not {seed}")
    word = int.from_bytes(hashlib.blake2b(str(role).encode(), digest_size=8).digest(), "little")
    key, counter_words = np.array([seed, word], np.uint64), np.array(counter, np.uint64)
    # The raw words, not Generator.random: NumPy promises that Philox's words stay what they are, not its
    # methods.
    words = np.random.Philox(key=key, counter=counter_words).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


def draw_view(
    augmentation: Augmentation, sizes: np.ndarray, *, seed: int, step: int, role: int | str, first_row: int
) -> ViewParams:
    """Draws one view of the rows first_row, first_row + 1, ... of the global batch of `step`.

    `sizes` is (B, 2) int, the stored height and width of each row's image. Every row owns DRAWS_PER_ROW
    draws, used or not, so a row's view depends on its global row number alone and the ranks' rows joined are
    one process's rows.
    """
    blocks = DRAWS_PER_ROW // 4
    draws = uniform(seed, role, (first_row * blocks, 0, 0, step), len(sizes) * DRAWS_PER_ROW)
    draws = draws.reshape(len(sizes), DRAWS_PER_ROW)
    tries, (top, left, *rest) = draws[:, : 2 * CROP_TRIES], draws[:, 2 * CROP_TRIES :].T
    flip, jitter, brightness, contrast, saturation, hue, grey, blur, sigma, _spare = rest
    jittered = jitter < augmentation.jitter

    def factor(draw: np.ndarray, strength: float) -> np.ndarray:
        drawn = between(draw, max(0.0, 1.0 - strength), 1.0 + strength)
        return np.where(jittered, drawn, 1.0).astype(np.float32)

    return ViewParams(
        box=random_resized_crop(augmentation, np.asarray(sizes), tries, top, left),
        flip=flip < augmentation.flip,
        brightness=factor(brightness, augmentation.brightness),
        contrast=factor(contrast, augmentation.contrast),
        saturation=factor(saturation, augmentation.saturation),
        hue=np.where(jittered, between(hue, -augmentation.hue, augmentation.hue), 0.0).astype(np.float32),
        grey=grey < augmentation.grey,
        sigma=np.where(blur < augmentation.blur, between(sigma, *augmentation.blur_sigma), 0.0).astype(
            np.float32
        ),
    )


def between(draws: np.ndarray, low: float, high: float) -> np.ndarray:
    """Draws in [0, 1) stretched to [low, high)."""
    return low + (high - low) * draws


def random_resized_crop(
    augmentation: Augmentation, sizes: np.ndarray, tries: np.ndarray, top: np.ndarray, left: np.ndarray
) -> np.ndarray:
    """torchvision's `RandomResizedCrop.get_params` for B images: (B, 4) int32 top, left, height, width.

    `tries` is (B, 20) uniform draws, an area and a log-ratio for each of ten boxes; the first that fits the
    image is taken. All ten are drawn always: rejection must not shift what later rows draw. If none fits, the
    largest centred box of an allowed ratio is taken, as torchvision does. An image without a size gets a box
    of one pixel.
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
    fallback_height = np.where(image_ratio < narrow, np.rint(widths / narrow), heights)
    fallback_width = np.where(image_ratio > wide, np.rint(heights * wide), widths)
    height = np.where(found, height[rows, first], fallback_height)
    width = np.where(found, width[rows, first], fallback_width)
    top = np.where(found, np.floor(top * (heights - height + 1)), (heights - height) // 2)
    left = np.where(found, np.floor(left * (widths - width + 1)), (widths - width) // 2)
    return np.stack([top, left, height, width], 1).astype(np.int32)


def center_view(center: Center, sizes: np.ndarray) -> CenterParams:
    """The evaluation view of B images whose stored heights and widths are `sizes`, (B, 2) int.

    Two roundings decide whether an evaluation agrees with torchvision's: the long side is truncated, and half
    an odd margin goes to the even pixel. A library's own "shorter side" and "centre" differ in both, at a
    price of 4.6 grey levels on average.
    """
    sizes = np.maximum(np.asarray(sizes, np.int64), 1)
    resized = center.resize * sizes // sizes.min(1, keepdims=True)
    half, odd = np.divmod(resized - center.size, 2)
    corner = half + odd * (half % 2)
    return CenterParams(resized.astype(np.int32), corner.astype(np.int32))


def blur_windows(sigma: np.ndarray) -> np.ndarray:
    """Pixels across a Gaussian kernel that holds three standard deviations on each side."""
    return 2 * np.ceil(3 * sigma).astype(np.int64) + 1
