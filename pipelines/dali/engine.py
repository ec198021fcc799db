"""Runs a DALI graph: built for a first step, run step after step ahead of its reader, handed to torch without
a copy."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from pipelines.dali import graphs
from pipelines.sampling.augmentation import Augmentation, Center
from pipelines.sampling.step_plan import Visit


class DaliEngine:
    """One built pipeline. `run()` gives the views of first_step, first_step + 1, ...; a RuntimeError ends its
    life.

    `plugin`: exact colour by our own operator, which `pipelines.dali.plugin.use.choose` has loaded.

    `visit` maps a step to its Visit and raises StopIteration after the last one. It is called by run(), in
    the caller's thread, up to `prefetch` steps ahead; the graph has no other input and no state.
    """

    def __init__(
        self,
        index: Any,
        augmentations: Sequence[Augmentation | Center],
        *,
        visit: Callable[[int], Visit],
        first_step: int,
        batch: int,
        device: str,
        device_id: int,
        threads: int,
        prefetch: int,
        dtype: torch.dtype,
        hw_decoder_share: float = graphs.ONE_DECODER,
        decoder_buffers: str = "grown",
        plugin: bool = False,
    ):
        if index.pixels is not None:
            stored = ResidentPixels(index.pixels, device, device_id)
        elif index.pack is not None:
            stored = PackedBytes(index.pack)
        else:
            stored = FilePaths(index)
        self._device, self._device_id = device, device_id
        self._pipeline = graphs.views(
            lambda iteration: stored(visit(first_step + iteration).indices),
            lambda iteration: graphs.view_arrays(augmentations, visit(first_step + iteration).views, plugin),
            augmentations,
            resident=index.pixels is not None,
            packed=index.pack is not None,
            plugin=plugin,
            images_stream=stored.stream,
            hw_decoder_load=hw_decoder_share,
            buffers=buffers(index.sizes, device, hw_decoder_share, decoder_buffers),
            dtype=str(dtype).removeprefix("torch."),
            batch_size=batch,
            num_threads=threads,
            prefetch_queue_depth=prefetch,
            **placement(device, device_id),
        )

    def run(self) -> list[torch.Tensor]:
        """The next step's views, each (B, 3, S, S) with channels-last strides, over DALI's own memory.

        The memory stays the tensors' for as long as they live: the dynamic executor counts their references.
        (The older executor would overwrite them two steps later; `graphs` therefore forces the dynamic one.)
        """
        if self._device == "gpu":
            # DALI orders its outputs, and their memory's return, on the stream that torch will read them
            # from. By position: a word would be taken for the name of an input of the graph.
            outputs = self._pipeline.run(torch.cuda.current_stream(self._device_id))
        else:
            outputs = self._pipeline.run()
        return [torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2) for output in outputs]


class FilePaths:
    """Image files, named to DALI, which reads them in its own threads."""

    stream = None

    def __init__(self, index: Any):
        self.index = index

    def __call__(self, indices: np.ndarray) -> list[np.ndarray]:
        return [encoded_path(self.index.path(i)) for i in indices]


class PackedBytes:
    """What image files hold, out of a pack. DALI copies it."""

    stream = None

    def __init__(self, pack: Any):
        self.pack = pack

    def __call__(self, indices: np.ndarray) -> list[np.ndarray]:
        return self.pack.fetch(indices)


class ResidentPixels:
    """A small data set held whole in the memory of the device: (N, H, W, 3) uint8, gathered by index per
    step.

    `stream` is the CUDA stream of the gathers on a GPU, which DALI must be told of; None on the CPU.
    """

    # The GPU's half follows the documentation of DALI 2.4's external_source (`cuda_stream`: "DALI schedules a
    # copy on this stream") and of torch's CUDA semantics; its tests have yet to run on a GPU.

    def __init__(self, pixels: np.ndarray, device: str, device_id: int):
        self.pixels, self.stream = pixels, None
        if device == "gpu":
            self.stream = gather_stream(device_id)
            # Allocated under the stream that reads it, as all else here: torch gives memory back to the
            # stream it came from, so what replaces it there waits for the last gather.
            with torch.cuda.stream(self.stream):
                self.pixels = torch.from_numpy(pixels).to(self.stream.device)

    def __call__(self, indices: np.ndarray) -> np.ndarray | torch.Tensor:
        # On the CPU this must stay NumPy: DALI asks a torch tensor for its CUDA stream, and torch then for a
        # driver.
        if self.stream is None:
            return self.pixels[indices]
        # Not on the training stream: reading ahead would queue behind the step that it is to overlap. Pinned,
        # because a copy from pageable memory holds up the host until the stream has come to it.
        with torch.cuda.stream(self.stream):
            wanted = torch.from_numpy(indices).pin_memory().to(self.stream.device, non_blocking=True)
            # DALI holds the result until its own copy is queued, on this stream; the memory, free from then
            # on, goes to a later gather of this same stream, which the copy precedes.
            return self.pixels[wanted]


@cache  # one for all loaders of a device: memory freed on one stream is of no use to the next one's loader
def gather_stream(device_id: int) -> torch.cuda.Stream:
    """The stream on which resident pixels are gathered, apart from training's."""
    return torch.cuda.Stream(torch.device("cuda", device_id))


class DaliDecoder:
    """Decodes one file at a time the way training does; raises RuntimeError where training would."""

    def __init__(self, device: str = "cpu", device_id: int = 0):
        self._placement = placement(device, device_id)
        self._image, self._packed, self._pipeline = None, None, None

    def __call__(self, image: os.PathLike | bytes) -> tuple[int, int]:
        """The (height, width) of the decoded image. The pipeline is kept until a file kills it."""
        self._image, packed = fed(image), isinstance(image, bytes)
        if self._pipeline is None or packed != self._packed:
            self._packed = packed
            self._pipeline = graphs.decoded(
                lambda: [self._image],
                packed=packed,
                batch_size=1,
                num_threads=1,
                prefetch_queue_depth=1,
                **self._placement,
            )
        try:
            (images,) = self._pipeline.run()
        except RuntimeError:
            self._pipeline = None
            raise
        height, width, _channels = images.shape()[0]
        return height, width


DALIS_OWN = 16 << 20  # bytes: what DALI 2.4 sets aside on the GPU where it is told nothing


def buffers(sizes: np.ndarray, device: str, hw_decoder_share: float, kind: str) -> dict[str, int]:
    """What a GPU's decoders set aside at the start: DALI's own sizes ("grown"), or enough for the "largest" image.

    `sizes` is int (N, 2), heights and widths. A decoder whose buffers are too small stops to grow them when a larger
    image comes. DALI's own examples set them for ImageNet; what that is worth here no GPU was at hand to tell.
    """
    if device != "gpu" or kind == "grown" or not sizes.size:
        return {}
    height, width = sizes.max(0).tolist()
    # 16-bit coefficients of three full planes, the most that a JPEG of this size has, and never less than DALI
    # takes by itself. It keeps one such buffer on the GPU and two in pinned host memory for each thread.
    coefficients = min(max(6 * int(sizes.prod(1, dtype=np.int64).max()), DALIS_OWN), 2**31 - 1)
    found = {"device_memory_padding": coefficients, "host_memory_padding": coefficients}
    if hw_decoder_share:  # DALI refused these on a card without such a decoder (NVIDIA/DALI issue 3704)
        found |= {"preallocate_height_hint": height, "preallocate_width_hint": width}
    return found


def placement(device: str, device_id: int) -> dict[str, Any]:
    """How a graph is told where to run: without a device id DALI needs no driver."""
    if device == "gpu":
        return {"decode": "mixed", "device_id": device_id}
    return {"decode": "cpu", "device_id": None}


def fed(image: os.PathLike | bytes) -> np.ndarray:
    """An image as a graph takes it: a file by its name, a packed one by its bytes."""
    return np.frombuffer(image, np.uint8) if isinstance(image, bytes) else encoded_path(image)


def encoded_path(path: os.PathLike) -> np.ndarray:
    """A path as DALI reads it from an array: its bytes, whatever characters the file system allows."""
    return np.frombuffer(os.fsencode(path), np.uint8)
