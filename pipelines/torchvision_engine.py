"""The same views from the same parameters in plain torchvision: the oracle of the DALI graphs, and their fallback.

It is written to be read: one image at a time. Where DALI is absent it is fast enough for a CPU or a small GPU run.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from pipelines.backend import LoaderOptions, to_device
from pipelines.sampling.augmentation import Augmentation, Center, CenterParams, ViewParams, blur_windows
from pipelines.sampling.step_plan import BatchDraws, EvaluationPlan, Plan

# The four color factors by their number in an order, and the value of each that changes nothing.
JITTER = (
    (F.adjust_brightness, "brightness", 1),
    (F.adjust_contrast, "contrast", 1),
    (F.adjust_saturation, "saturation", 1),
    (F.adjust_hue, "hue", 0),
)


class TorchvisionEngine:
    """An engine of `pipelines.engines`, whose `threads` threads read `prefetch` steps ahead."""

    def __init__(
        self,
        plan: Plan | EvaluationPlan,
        options: LoaderOptions,
        *,
        draws: Callable[[int], BatchDraws],
        first_step: int,
    ):
        self._index, self._augmentations, self._draws = plan.index, plan.augmentations, draws
        self._step, self._prefetch = first_step, options.prefetch
        self._device = (
            torch.device("cuda", options.device_id) if options.device == "gpu" else torch.device("cpu")
        )
        self._pool = ThreadPoolExecutor(options.threads)
        self._pending: dict[int, list[Future]] = {}

    def __del__(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def run(self) -> list[torch.Tensor]:
        """Return the next step's views, each (B, 3, S, S) channels-last. Raises RuntimeError for a bad file."""
        for step in range(self._step, self._step + self._prefetch):
            if step not in self._pending:
                try:
                    draws = self._draws(step)
                except StopIteration:
                    break
                rows = range(len(draws.indices))
                self._pending[step] = [self._pool.submit(self._one_image, draws, row) for row in rows]
        rows = [future.result() for future in self._pending.pop(self._step)]
        self._step += 1
        views = (torch.stack(view).contiguous(memory_format=torch.channels_last) for view in zip(*rows))
        return [to_device(view, self._device) for view in views]

    def _one_image(self, draws: BatchDraws, row: int) -> list[torch.Tensor]:
        i = int(draws.indices[row])
        pixels = self._index.rgb(i)
        if pixels.shape[:2] != tuple(self._index.sizes[i]):
            # torchvision would pad a crop that reaches over the edge; DALI's slice refuses it.
            raise RuntimeError(f"{self._index.name(i)} has another size than its crop was drawn for")
        if self._index.length_now(i) is not None:
            raise RuntimeError(f"{self._index.name(i)} has another length than in the index")
        image = torch.tensor(pixels).permute(2, 0, 1)
        views = zip(self._augmentations, draws.views)
        return [one_view(image, augmentation, view, row) for augmentation, view in views]


def one_view(
    image: torch.Tensor, augmentation: Augmentation | Center, view: ViewParams | CenterParams, row: int
) -> torch.Tensor:
    """Return the view of row `row`, (3, S, S) float32, of a (3, H, W) uint8 image."""
    if isinstance(augmentation, Center):
        assert isinstance(view, CenterParams)
        image = F.resize(image, view.resized[row].tolist(), InterpolationMode.BILINEAR, antialias=True)
        top, left = view.corner[row].tolist()
        image = F.crop(image, top, left, augmentation.size, augmentation.size)
    else:
        assert isinstance(view, ViewParams)
        image = augmented(image, view, row, augmentation)
    image = F.to_dtype(image, torch.float32, scale=True)  # to [0, 1]
    return F.normalize(image, list(augmentation.mean), list(augmentation.std))


def augmented(image: torch.Tensor, view: ViewParams, row: int, augmentation: Augmentation) -> torch.Tensor:
    """Return a random view, (3, S, S) uint8, of a (3, H, W) uint8 image."""
    top, left, height, width = view.box[row].tolist()
    size = [augmentation.size, augmentation.size]
    image = F.resized_crop(image, top, left, height, width, size, InterpolationMode.BILINEAR, antialias=True)
    if view.flip[row]:
        image = F.horizontal_flip(image)
    if augmentation.recolors:
        for i in view.order[row]:
            adjust, factors, neutral = JITTER[i]
            factor = float(getattr(view, factors)[row])
            image = image if factor == neutral else adjust(image, factor)
    if view.gray[row]:
        image = F.rgb_to_grayscale(image, num_output_channels=3)
    if view.sigma[row] > 0:
        window = augmentation.blur_window
        window = int(blur_windows(view.sigma[row])) if window == "auto" else window
        image = F.gaussian_blur(image, [window, window], [float(view.sigma[row])])
    return image
