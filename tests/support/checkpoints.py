"""Small checkpoints for tests, and ways to spoil them."""

from pathlib import Path

import torch

from fastsuncet.checkpoint import manager


def save(folder: Path, step: int, keep: int = 10, **changes) -> Path:
    contents = {
        "model": {"weight": torch.full((3, 2), float(step))},
        "state": {"step": step, "momentum": [torch.arange(4.0) * step]},
        "meta": {"config": {"criterion": {"temperature": 0.1}}, "ledger": {"images": 7}},
    }
    return manager.save(folder, step, keep=keep, **contents | changes)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """The step that load_newest finds, and what it says on the way."""
    lines = []
    loaded = manager.load_newest(folder, say=lines.append)
    return loaded and loaded.step, lines


def corrupt(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        content = content[:-1]
    elif how == "empty":
        content = b""
    elif how == "flipped":
        content[len(content) // 2] ^= 4
    elif how == "longer":
        content += b"\0"
    elif how == "zeros":  # what a power cut leaves of an unsynced file on some file systems
        content = bytes(len(content))
    path.write_bytes(content)
