"""torchvision's color jitter in a DALI graph, of DALI's own operators and arithmetic.

`pipelines.dali.view_operator` computes it, and all that follows it, in one operator: the same pixels, faster.

Every function takes and returns a node of uint8 HWC RGB images and runs on its image's device. Two orders of the four
factors differ by about 9 gray levels.

Mean absolute difference from torchvision (uint8 tensors, same order) in gray levels of 255, on 32 ImageNet crops of
224, where crop and resize alone account for 0.16:

    brightness .4, 1.6   0.39, 0.44
    contrast .3, 1.7     0.88, 0.30
    saturation .3, 1.7   0.88, 0.40
    hue .05, .1, .2      0.24 to 0.27
    gray                 0.58
    all, as drawn        1.2 to 1.5

DALI's `color_twist`, one linear map, is not used: its contrast is about a fixed 128 (12 to 17 levels from
torchvision's), and its hue turns a plane beside luma (5 to 8).
"""

# DALI's stubs lack operators, constants and the arithmetic of nodes.
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.math as dmath
import nvidia.dali.types as types

FACTORS = ("brightness", "contrast", "saturation", "hue")
# An order of the factors as one number: two bits for each place, the first in the lowest.
BITS = np.array([1, 4, 16, 64], np.int32)


def jitter(image, augmentation, view):
    """Apply the four color factors that `view` holds as nodes (see `pipelines.dali.graphs.view_inputs`).

    The fixed order is brightness, contrast, saturation, hue. Images that are not to be jittered come with neutral
    factors, which change no pixel. That is cheaper than sorting these images out and back in.
    """
    if augmentation.color_order == "fixed":
        for name in FACTORS:
            if getattr(augmentation, name):
                image = adjusted(image, view, name)
        return image
    # Every image takes one branch of four, four times: a batch is split by factor and merged again.
    for place in range(len(FACTORS)):
        factor = (view.order // int(BITS[place])) & 3
        for i, name in enumerate(FACTORS):
            if getattr(augmentation, name):
                if factor == i:
                    image = adjusted(image, view, name)
                else:
                    image = image  # DALI requires that both branches assign the result
    return image


def adjusted(image, view, name: str):
    """Apply one factor."""
    if name == "brightness":
        return fn.brightness(image, brightness=view.brightness)
    if name == "contrast":
        return contrast(image, view.contrast)
    if name == "saturation":
        return fn.saturation(image, saturation=view.saturation)
    if view.hue != 0:  # the one operator slow enough to be worth a condition
        image = hue(image, view.hue)
    else:
        image = image
    return image


def contrast(image, factor):
    """Blend each image with the mean of its gray version: mean + factor * (image - mean)."""
    mean = fn.reductions.mean(fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY))
    if image.device == "gpu":
        # An operator's argument must be on the CPU, and copying the mean there would stall every batch.
        return contrast_expression(mean, on_device_of(image, factor), image)
    # The same bits as the expression, in a twentieth of its time on a CPU.
    return fn.brightness_contrast(image, contrast=factor, contrast_center=mean)


def contrast_expression(mean, factor, image):
    """Compute contrast as an expression, rounded and clipped to uint8."""
    return fn.cast(mean + factor * (image - mean), dtype=types.UINT8)


def hue(image, turns):
    """Rotate the hue of each image by `turns` of the color circle in HSV, keeping saturation and value.

    With value V, chroma C and hue H in sixths of a turn, channel n of (5, 3, 1) is
    V - C * clamp(min(k, 4 - k), 0, 1) where k = (n + H) mod 6: HSV to RGB without a case for each sextant.
    """
    red, green, blue = (image[:, :, channel : channel + 1] for channel in range(3))
    value = dmath.max(red, dmath.max(green, blue))
    # Masks of the largest channel, the first on a tie. They are numbers because a graph has no branch for a pixel.
    red_max = fn.cast(red == value, dtype=types.FLOAT)
    green_max = fn.cast(green == value, dtype=types.FLOAT) * (1 - red_max)
    blue_max = (1 - red_max) * (1 - green_max)
    chroma = fn.cast(value - dmath.min(red, dmath.min(green, blue)), dtype=types.FLOAT)
    red, green, blue = (fn.cast(channel, dtype=types.FLOAT) for channel in (red, green, blue))
    difference = red_max * (green - blue) + green_max * (blue - red) + blue_max * (red - green)
    # A gray pixel has chroma 0, which makes its hue irrelevant; the floor of 1 only keeps the division finite.
    sixths = (
        difference / dmath.max(chroma, 1.0) + 2 * green_max + 4 * blue_max + 6 * on_device_of(image, turns)
    )
    k = sixths + types.Constant(np.float32([5, 3, 1]), device=image.device)  # (H, W, 1) + (3,)
    k = k - 6 * dmath.floor(k / 6)
    return fn.cast(value - chroma * dmath.clamp(dmath.min(k, 4 - k), 0.0, 1.0), dtype=types.UINT8)


def gray(image, chosen):
    """Replace the images whose `chosen` is not 0 by three equal channels of luma."""
    if chosen != 0:
        luma = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
        image = fn.color_space_conversion(luma, image_type=types.GRAY, output_type=types.RGB)
    else:
        image = image
    return image


def on_device_of(image, number):
    """Return a per-image number on the image's device: an expression cannot mix CPU and GPU operands."""
    return number.gpu() if image.device == "gpu" else number
