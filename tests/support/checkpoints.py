"""Small checkpoints for tests, and ways to damage them."""

from pathlib import Path

import torch

from fastsuncet.checkpoint import manager


def save(folder: Path, step: int, keep: int = 10, **changes) -> Path:
    content = {
        "model": {"weight": torch.full((3, 2), float(step))},
        "state": {"step": step, "momentum": [torch.arange(4.0) * step]},
        "meta": {"config": {"criterion": {"temperature": 0.1}}, "ledger": {"images": 7}},
    }
    return manager.save(folder, step, keep=keep, **content | changes)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """Return the step that load_newest finds, and the lines it prints."""
    lines = []
    loaded = manager.load_newest(folder, say=lines.append)
    return loaded and loaded.step, lines


DAMAGE = {
    "truncated": lambda content: content[:-1],
    "empty": lambda content: b"",
    "flipped": lambda content: bytes([content[0] ^ 4]) + content[1:],
    "longer": lambda content: content + b"\0",
    "zeros": lambda content: bytes(
        len(content)
    ),  # what a power cut leaves of an unsynced file on some systems
}


def corrupt(path: Path, how: str) -> None:
    """Damage the file at `path` in one of the ways of DAMAGE, or remove it ("missing")."""
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(DAMAGE[how](path.read_bytes()))
