"""Small real runs for tests: scikit-learn's digits through DALI, a tiny ResNet, ten steps of four an epoch."""

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsuncet.checkpoint import manager
from fastsuncet.commands import train as train_command
from fastsuncet.commands.ranks import as_rank
from fastsuncet.config import Config, load_config
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.errors import Preempted
from fastsuncet.paths import cli_command
from fastsuncet.tuning import processes

# Of metrics lines, different in every run.
TIMED = ("seconds", "joules", "views_per_second", "data_wait", "peak_memory_gb")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = (
    "criterion.unsupervised_batch_size=360",  # 1,442 images: 4 steps an epoch, 2 images left over
    "criterion.supervised_imgs_per_class=4",
    "optimization.steps=10",
    "optimization.warmup=1",
    "checkpoint.every=3",
    "logging.log_every=4",
    "evaluation.knn_every_epochs=null",
    "meta.threads=1",
)

TINY = (
    *("data.kind=synthetic", "data.root=null", "data.synthetic.images=146", "data.synthetic.size=8"),
    *("data.split.fraction=0.5", "criterion.unsupervised_batch_size=36", "checkpoint.export=[]"),
)


class Killed(BaseException):
    """Stands for kill -9: no handler runs and nothing is saved on the way out."""


def kill() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def interrupted_at(stream: type, step: int, how: Callable[[], None]) -> Iterator[None]:
    """Call `how()` whenever a stream of this class is asked for `step`, before it answers."""
    read = stream.__call__

    def interrupted(self, asked: int, *more):
        if asked == step:
            how()
        return read(self, asked, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "__call__", interrupted)
        yield


def small_config(folder: Path, *overrides: str) -> Config:
    """Return the demo's config, cut to ten steps, with its run in `folder`."""
    return load_config(CONFIGS / "digits_demo.yaml", [*SMALL, f"logging.folder={folder}", *overrides])


def tiny_config(folder: Path, *overrides: str) -> Config:
    """Return small_config with a tenth of its images, which are synthetic, and without an export."""
    return small_config(folder, *TINY, *overrides)


def train(config: Config, *, stop_at: int | None = None, rank: int | None = None) -> dict[int, str]:
    """Start or continue a run; return a digest of every batch it saw, by step.

    `stop_at` sends this process (only `rank`, where given) a real SIGTERM while that step's batch is being read; the
    run must then save and end as preempted.
    """
    seen: dict[int, str] = {}
    read = PairedStream.__call__

    def watched(stream: PairedStream, step: int, supervised: bool = True):
        batch = read(stream, step, supervised)
        digest = hashlib.sha256()
        for tensor in (*batch.views, batch.labeled, batch.labels):
            digest.update(tensor.numpy(force=True).tobytes())
        seen[step] = digest.hexdigest()
        if step == stop_at and rank in (None, stream.place.rank):
            terminate()
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairedStream, "__call__", watched)
        try:
            with as_rank(config) as place:
                train_command.train(config, place)
        except Preempted:
            assert stop_at is not None
    return seen


def assert_continues(straight: Config, stopped: Config, *stops: int) -> None:
    """Train `straight` at once and `stopped` with a stop at each of these steps: both must end with the same bits."""
    train(straight)
    for step in (*stops, None):
        train(stopped, stop_at=step)
    assert_equal_to_the_bit(final_state(stopped), final_state(straight))


def shorten_tuning(patch: pytest.MonkeyPatch) -> None:
    """Let the children of a tuning warm up briefly and time short windows. All else of them is real."""
    code = (
        "import sys; from fastsuncet import cli; from fastsuncet.tuning import child; "
        "child.WARMUP_IN_DDP, child.SECONDS = 1, 0.01; sys.exit(cli.main(sys.argv[1:]))"
    )
    words, before = processes.child_command, len(cli_command())
    patch.setattr(
        processes, "child_command", lambda *files: [sys.executable, "-c", code, *words(*files)[before:]]
    )


def metrics(folder: Path, kind: str | None = None) -> list[dict]:
    """Return the metrics lines in `folder`, of one kind or all, without what is different in every run.

    All but the first, of kind "chosen", which says what was chosen for the hardware.
    """
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in record.items() if key not in TIMED}
        for record in records
        if record["kind"] != "chosen" and kind in (None, record["kind"])
    ]


def final_state(config: Config) -> tuple[dict[str, torch.Tensor], dict, list[dict]]:
    """Return (weights and statistics, the rest of the state, metrics lines without times) of a run that ended."""
    loaded = manager.load_newest(config.run_folder / "checkpoints")
    return loaded.model, loaded.state, metrics(config.run_folder)


def assert_equal_to_the_bit(ours: Any, theirs: Any, path: str = "state") -> None:
    """Compare nested dicts, lists and tensors; a tensor must agree in dtype, shape and every bit."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            assert_equal_to_the_bit(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs)):
            assert_equal_to_the_bit(a, b, f"{path}[{i}]")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), path
    else:
        assert ours == theirs, path
