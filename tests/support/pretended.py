"""A run of the paper on GPUs that are only named, and stand-ins for the processes that try its fast paths."""

from pathlib import Path

import pytest
import torch

from fastsuncet.config import Arithmetic, Config, load_config
from fastsuncet.kernels import switches
from fastsuncet.optim import lars_kernel
from fastsuncet.tuning import processes, verdicts
from fastsuncet.tuning.fast_paths import GRAPH
from fastsuncet.tuning.verdicts import Verdict, judge
from pipelines import cuda_compiler
from pipelines.dali.view_operator import use
from tests.support.runs import CONFIGS

CARD = torch.device("cuda", 0)
DATA = ("data.root=none", "data.split.file=none", "data.view_operator=false", "meta.precision=bf16")


def paper(world_size: int, *overrides: str) -> tuple[Config, Arithmetic]:
    """Return `in1k_10pct` and its sizes on so many processes."""
    config = load_config(CONFIGS / "in1k_10pct.yaml", [*DATA, *overrides])
    return config, config.resolve(world_size, 1_281_167, 1000, 128_000)


def pretend(patch: pytest.MonkeyPatch, folder: Path, **machine) -> None:
    """Let this process have NVRTC and such a GPU, and verdicts in `folder`."""
    patch.setenv("FASTSUNCET_CACHE", str(folder / "cache"))
    patch.setattr(switches, "_reasons", {})
    patch.setattr(use, "proved", set())
    patch.setattr(cuda_compiler, "unavailable", lambda: None)
    patch.setattr(lars_kernel, "apex", lambda: None)
    card = {"card": "a card", "driver": "1", "memory": 1 << 50, **machine}
    patch.setattr(verdicts, "describe_machine", lambda device: card)


class Children:
    """Stands for the processes that try something: `found` has each path's verdict, or the signal that kills it."""

    def __init__(self, patch: pytest.MonkeyPatch, graph=None, **found):
        self.found, self.tried = {path.replace("_", "."): what for path, what in found.items()}, []
        self.seconds = 0  # of a clock on which a process takes 10 to start and each path 5
        self.graph = graph or {"base": [2.0] * 8, "contender": [1.0] * 4}
        patch.setattr(processes, "run_child", self.run)
        patch.setattr(processes, "compare", self.compare)

    def run(self, request, environment, go_on):
        lines = []
        self.tried.append(request["try"])
        self.seconds += 10 + 5 * len(request["try"])
        for path in request["try"]:
            lines.append({"path": path})
            verdict = self.found.get(path, Verdict())
            if isinstance(verdict, str):
                return lines, f"was killed by {verdict}: no output"
            lines.append({"path": path, **vars(verdict)})
        return lines, "ended with exit code 0: no output"

    def compare(self, *_):
        self.tried.append(GRAPH)
        self.seconds += 15
        return judge([Verdict(**self.graph)])
