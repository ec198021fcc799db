"""The two engines that turn draws into pixels, and which of them options ask for."""

from collections.abc import Callable
from typing import Protocol

import torch

from pipelines.backend import LoaderOptions


class Engine(Protocol):
    """Turns draws into pixels: each run() gives the next step's views, until a RuntimeError ends its use."""

    def run(self) -> list[torch.Tensor]: ...


def engine_of(options: LoaderOptions) -> Callable[..., Engine]:
    """Return what starts an engine: engine_of(options)(plan, options, draws=..., first_step=...).

    `draws` maps a step to its BatchDraws and raises StopIteration after the last step.
    """
    # Imported where they are used: `import pipelines.loader` must work where DALI does not.
    if options.backend == "dali":
        from pipelines.dali.engine import DaliEngine

        return DaliEngine
    from pipelines.torchvision_engine import TorchvisionEngine

    return TorchvisionEngine
