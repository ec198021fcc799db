"""One update of a config on a batch, by our step and by a plain PyTorch one."""

import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import Batch, PairedStream
from fastsuncet.distributed.place import Place
from fastsuncet.models.resnet import build_model
from fastsuncet.training.cuda_graph import GraphedStep
from fastsuncet.training.determinism import PRECISIONS, resolve_precision, set_determinism
from fastsuncet.training.step import build, train_step
from fastsuncet.tuning.paths import PATHS, resolved
from tools.bench.harness import Call


class StepBench:
    """The contenders of one process on one config, as calls that each make one update."""

    def __init__(self, config: Config, place: Place, batch: Batch, classes: int):
        self.config, self.place, self.batch, self.classes = config, place, batch, classes
        self.notes: list[str] = []  # why there is no CUDA graph where one was asked for

    @classmethod
    def open(cls, config: Config, place: Place) -> tuple["StepBench", PairedStream]:
        """Return the bench over a config's first batch, and the stream of its batches, which the caller closes."""
        config, _ = resolve_precision(config, place.device)
        images = open_images(config, place, validation=False)
        arithmetic = config.resolve(place.world_size, *images.counts())
        if place.on_gpu:
            # As in a run whose trials pass. Without, a loader would take DALI's own operators, at a third of the speed.
            found = {
                name: path.excluded(config, arithmetic) or path.missing() for name, path in PATHS.items()
            }
            config = resolved(config, found)
        stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
        return cls(config, place, stream(0), len(images.train.classes)), stream

    @cached_property
    def _update(self) -> Callable[[Batch], Tensor]:
        """Our step of one network, for all contenders: a card of 80 GB does not hold two graphs and the plain step."""
        _, network, optimizer, method = build(self.config, self.place, self.classes)
        if self.config.meta.cuda_graph is True:
            graphed = GraphedStep(network, optimizer, method, say=self.notes.append)
            return lambda batch: graphed(batch, 1e-3)
        return lambda batch: train_step(network, optimizer, batch, 1e-3, method)

    def ours(self, batch_of: Callable[[int], Batch]) -> Call:
        """Return our step on the batches that `batch_of` returns, from the one after the first on."""
        # A loader starts anew for a step that does not follow the one before.
        update, steps = self._update, itertools.count(self.batch.step + 1)

        def step() -> Any:
            # These switches belong to the process, and the other contender sets them differently.
            set_determinism(self.config, self.place)
            return update(batch_of(next(steps)))

        return step

    def plain(self) -> Call:
        """Return the step of a tutorial in our precision and memory layout; its kernels need not be deterministic."""
        m, meta, tau = self.config.model, self.config.meta, self.config.criterion.temperature
        layout = torch.channels_last if meta.channels_last else torch.contiguous_format
        model = build_model(m.name, m.stem, *m.head).to(self.place.device, memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-6)
        # DALI writes channels-last, and a convolution prefers that of two layouts: NCHW images must be made.
        views = torch.cat([*self.batch.views, self.batch.labeled]).contiguous(memory_format=layout)
        first, second = views[: len(views) // 2 * 2].chunk(2)
        device, dtype = self.place.device.type, PRECISIONS[meta.precision]
        free = self.config.model_copy(update={"meta": meta.model_copy(update={"deterministic": False})})

        def step() -> Tensor:
            set_determinism(free, self.place)
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                z = model(torch.cat([first, second]))
            value = dense_nt_xent(*z.float().chunk(2), tau)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            return value.detach()

        return step


def dense_nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return NT-Xent as tutorials write it: (B, D) twice -> the mean over 2B anchors, by one (2B, 2B) matrix."""
    z = F.normalize(torch.cat([first, second]))
    logits = z @ z.T / temperature
    logits.fill_diagonal_(float("-inf"))
    number = torch.arange(len(z), device=z.device)
    return F.cross_entropy(logits, number.roll(len(first)))
