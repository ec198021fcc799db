"""Run a DALI graph: built for a first step, read step after step ahead of its reader, given to torch without a copy."""

# DALI's decorator adds options to a graph that its stubs do not know.
# pyright: reportCallIssue=false

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray, to_torch_type
from nvidia.dali.tensors import TensorCPU, TensorListCPU

from pipelines.backend import LoaderOptions
from pipelines.dali import graphs
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.shards import Shards, allow_open_files
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.step_plan import BatchDraws, EvaluationPlan, Plan

# Threads that read a pack: at 2 ms a read 16 fetch 8,000 images a second, more than a card's share of cores decodes.
READERS = 16


class DaliEngine:
    """One built pipeline, an engine of `pipelines.engines`. A plan without augmentations has no views: it only decodes.

    run() calls `draws` in the caller's thread, up to `prefetch` steps ahead. The graph has no other input and no state.
    `options` have no "auto", and the view operator is loaded if it makes the views.
    """

    def __init__(
        self,
        plan: Plan | EvaluationPlan,
        options: LoaderOptions,
        *,
        draws: Callable[[int], BatchDraws],
        first_step: int,
    ):
        index, augmentations = plan.index, plan.augmentations
        self._draws, self._step = draws, first_step
        self._sizes = None if augmentations else index.sizes  # to be compared with the decoded images'
        self._lengths = None  # in bytes, of the index's files

        def indices(iteration: int) -> np.ndarray:
            return draws(first_step + iteration).indices

        if index.pixels is not None:
            pixels = index.pixels
            images, stored = lambda iteration: pixels[indices(iteration)], "pixels"
        elif index.pack is not None:
            images, stored = PackedImages(index.pack, indices), "bytes"
        else:
            images, stored = lambda iteration: file_paths(index, indices(iteration)), "files"
            self._lengths = None if index.stamps is None else index.stamps[:, 0]
            require_open_files(plan.batch)
        self._files = stored == "files"
        self._stream = side_stream(options.device_id) if options.device == "gpu" else None
        self._step_done: torch.Event | None = None  # recorded on training's stream when it had queued a step
        self._pipeline = graphs.views(
            images,
            lambda iteration: graphs.view_arrays(augmentations, draws(first_step + iteration).views),
            augmentations,
            stored=stored,
            upright=index.upright,
            view_operator=options.view_operator,
            hw_decoder_share=options.hw_decoder_share,
            batch_size=plan.batch,
            num_threads=options.threads,
            prefetch_queue_depth=options.prefetch,
            # Only DALI's operators need conditions. To find them takes half of a small run's start.
            enable_conditionals=not options.view_operator
            and any(isinstance(each, Augmentation) for each in augmentations),
            decode="mixed" if options.device == "gpu" else "cpu",
            # Without a device id DALI needs no driver.
            device_id=options.device_id if options.device == "gpu" else None,
        )

    def run(self) -> list[torch.Tensor]:
        """Return the next step's views, each (B, 3, S, S) with channels-last strides.

        On a CPU they are in DALI's own memory, which stays theirs as long as the tensors exist: the dynamic executor
        counts references. (The older executor would overwrite them two steps later, so `graphs` forces the dynamic
        one.) On a GPU they are torch's, and ready for its present stream; work of more than two steps is never queued.
        """
        if self._stream is None:
            outputs = self._images(self._pipeline.run())
            views = [torch.from_dlpack(output.as_tensor()) for output in outputs]
        else:
            views = self._run_beside_training(self._stream)
        return [view.permute(0, 3, 1, 2) for view in views]

    def _images(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs that are views. Raises RuntimeError for files of another length than in the index.

        Without augmentations there are none, and RuntimeError is raised for images of another size than in the index.
        """
        if self._files:
            *outputs, lengths = outputs
            if self._lengths is not None:
                wanted = self._lengths[self._draws(self._step).indices]
                if not np.array_equal(np.ravel(lengths.as_array()), wanted):
                    raise RuntimeError("files have another length than in the index")
        if self._sizes is not None:
            wanted = self._sizes[self._draws(self._step).indices].tolist()
            for (height, width, _), (h, w) in zip(outputs[0].shape(), wanted):
                if (height, width) != (h, w):
                    raise RuntimeError(f"decodes to {width} x {height} pixels, but its header says {w} x {h}")
            outputs = []
        self._step += 1
        return outputs

    def _run_beside_training(self, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """Return the next views in memory of torch's, copied on `stream`; training's stream waits for the copy alone.

        DALI takes its own memory back in the order of that copy. A tensor that torch were given without a copy would
        return it by a synchronization of the whole device (`dltensor.h` of DALI 2.4).
        """
        training = torch.cuda.current_stream(stream.device)
        # What is queued now is the step before this one, and the event found here is of the one before that. Without
        # this wait the host would run ahead of the GPU, and each step ahead holds a batch.
        # Blocking: other waits would keep a core busy, which decodes.
        done = training.record_event(torch.cuda.Event(blocking=True))
        two_steps_ago, self._step_done = self._step_done, done
        if two_steps_ago is not None:
            two_steps_ago.synchronize()
        with torch.cuda.stream(stream):
            # The stream goes by position: a keyword would be taken for the name of an input of the graph.
            outputs = [output.as_tensor() for output in self._images(self._pipeline.run(stream))]
            views = [
                torch.empty(output.shape(), dtype=to_torch_type[output.dtype], device=stream.device)
                for output in outputs
            ]
            for output, view in zip(outputs, views):
                feed_ndarray(output, view, cuda_stream=stream)
        training.wait_stream(stream)
        for view in views:
            # Allocated on one stream and read on the other: torch must not reuse the memory before that.
            view.record_stream(training)
        return views


def file_paths(index: ImageIndex, indices: np.ndarray) -> np.ndarray:
    """Return the paths of image files, (B, W) uint8, which DALI reads in its own threads.

    They have one length, so that DALI takes them as one array. After the root, "/" fills the short ones: a file system
    reads any number of them as one.
    """
    assert index.root is not None
    root, names = os.fsencode(index.root) + b"/", [os.fsencode(index.name(i)) for i in indices.tolist()]
    longest = max(map(len, names))
    paths = b"".join(root + name.rjust(longest, b"/") for name in names)
    return np.frombuffer(paths, np.uint8).reshape(len(names), -1)


class PackedImages:
    """The encoded images of a pack by iteration: the next one's are read while the present one's are decoded.

    `indices` maps an iteration to the images' numbers, int64, and raises StopIteration after the last one. Threads read
    the bytes and copy them into DALI's memory, where a graph uses them without a copy (`no_copy`), so that the caller's
    thread does neither. An iteration other than the next one is read when it is asked for.
    """

    def __init__(self, pack: Shards, indices: Callable[[int], np.ndarray]):
        self._pack, self._indices = pack, indices
        self._readers, self._collector = ThreadPoolExecutor(READERS), ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[TensorListCPU]] = {}

    def __call__(self, iteration: int) -> TensorListCPU:
        batch = self._ahead.pop(iteration, None) or self._start(iteration)
        self._ahead.clear()
        with contextlib.suppress(StopIteration):
            self._ahead[iteration + 1] = self._start(iteration + 1)
        return batch.result()

    def _start(self, iteration: int) -> "Future[TensorListCPU]":
        return self._collector.submit(self._read, self._indices(iteration))

    def _read(self, indices: np.ndarray) -> TensorListCPU:
        parts = self._readers.map(self._pack.fetch, np.array_split(indices, READERS))
        return TensorListCPU([TensorCPU(image) for part in parts for image in part], contiguous=True)


def require_open_files(batch: int) -> None:
    """Raise the limit of open files for a batch of each of two streams. Raises DataError if one has no room.

    DALI opens all files of a batch before it reads the first one.
    """
    limit = allow_open_files(2 * batch)
    if limit < batch + 100:
        raise DataError(
            f"a batch of {batch:,} images opens as many files at a time, but this process may open {limit:,}: raise "
            f"the hard limit (`ulimit -Hn`) to {2 * batch + 512:,}, or read a pack (`fastsuncet data pack`)"
        )


# One for all loaders of a device: memory freed on one stream is of no use to a loader with another.
@cache
def side_stream(device_id: int) -> torch.cuda.Stream:
    """Return the stream, apart from training's, on which DALI's results are copied."""
    return torch.cuda.Stream(torch.device("cuda", device_id))
