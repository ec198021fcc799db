"""Whether two runs ended in the same bits."""

import json
from pathlib import Path
from typing import Any

import torch

from fastsuncet.checkpoint import manager
from fastsuncet.config import Config

# Of metrics lines, different in every run.
TIMED = ("seconds", "joules", "views_per_second", "data_wait", "peak_memory_gb")


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
