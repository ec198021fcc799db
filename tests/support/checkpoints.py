"""Small checkpoints for tests, and ways to damage a file."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fastsuncet.checkpoint import format, manager
from fastsuncet.config import Config
from tests.support.runs import assert_equal_to_the_bit


def content(step: int, rows: int = 3) -> dict:
    """Return what a run would save at `step`: every value depends on the step, so that a mixture is noticed."""
    weights = torch.full((rows, 32), float(step)) + torch.arange(32)
    return {
        "model": {"weight": weights, "count": torch.tensor(step)},
        "state": {"step": step, "momentum": [weights / 2]},
        "meta": {"config": {"criterion": {"temperature": 0.1}}, "ledger": {"views": 7 * step}},
    }


def save(folder: Path, step: int, keep: int = 10, rows: int = 3, **changes) -> Path:
    return manager.save(folder, step, keep=keep, **content(step, rows) | changes)


def save_model(folder: Path, config: Config, model: nn.Module, *steps: int, **more) -> None:
    """Save a run's checkpoints of `steps`, with `model`; `more` is added to their meta.json."""
    for step in steps:
        ledger = {"views": 64 * step, "updates": step, "petaflops": 0.1, "seconds": 1.5}
        meta = {"config": config.canonical(), "ledger": ledger, "epoch": step / 4, "world_size": 1, **more}
        manager.save(folder / "checkpoints", step, model=model.state_dict(), state={}, meta=meta, keep=99)


def assert_whole(loaded: format.LoadedCheckpoint) -> None:
    wanted = content(loaded.step, len(loaded.model["weight"]))
    assert_equal_to_the_bit([loaded.model, loaded.state], [wanted["model"], wanted["state"]])
    assert loaded.meta["ledger"] == wanted["meta"]["ledger"]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """Return the step that load_newest finds, and the lines it prints."""
    lines = []
    loaded = manager.load_newest(folder, say=lines.append)
    return loaded and loaded.step, lines


def rewritten_by(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def in_place_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


HARMS = {  # what can happen to a file
    "missing": Path.unlink,
    "truncated": rewritten_by(lambda content: content[:-1]),
    "half": rewritten_by(lambda content: content[: len(content) // 2]),
    "empty": rewritten_by(lambda content: b""),
    "flipped": rewritten_by(lambda content: bytes([content[0] ^ 4]) + content[1:]),
    "longer": rewritten_by(lambda content: content + b"\0"),
    # What a power cut leaves of an unsynced file on some systems.
    "zeros": rewritten_by(lambda content: bytes(len(content))),
    "pipe": in_place_by(os.mkfifo),  # opening it would wait for ever
    "endless device": in_place_by(lambda path: path.symlink_to("/dev/zero")),
    "folder": in_place_by(os.mkdir),
    "50 GB": lambda path: os.truncate(path, 50 << 30),
}
