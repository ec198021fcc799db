"""`fastsuncet tune` prints, draws and keeps what it found."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from fastsuncet import cli
from fastsuncet.commands import tune
from fastsuncet.config import load_config
from fastsuncet.tuning import rungs
from fastsuncet.tuning.rungs import candidates
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, shorten_tuning

# One rung is left: the others are written.
WRITTEN = ("meta.compile=false", "data.color_operator=graph", "data.decode_threads=1")
SMALL = ("criterion.unsupervised_batch_size=20", "criterion.supervised_imgs_per_class=2")


def tune_on_a_rank(rank: int, world_size: int, folder: str) -> str:
    """Tune as the command does, and return what it prints."""
    config, picture = str(CONFIGS / "digits_demo.yaml"), f"{folder}/speed.png"
    words = [config, *WRITTEN, *SMALL, f"logging.folder={folder}", "--minutes", "20", "--output", picture]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("FASTSUNCET_CACHE", f"{folder}/cache")
        shorten_tuning(patch)
        assert cli.main(["tune", *words]) == 0
    return printed.getvalue()


@pytest.mark.slow
def test_tune_the_demo_on_two_ranks(tmp_path):
    """One process tunes in tests/tuning/test_settle.py."""
    printed, _ = run_ranks(tune_on_a_rank, 2, str(tmp_path))
    found = json.loads((tmp_path / "speed.json").read_text())
    (row,) = found["rungs"]
    assert row["name"] == "read-ahead: 3" and row["problem"] is None and found["key"]["ranks"] == 2
    assert row["views"] == 2 * 20 + 2 * 10 and len(row["seconds"]["plain"]) >= 3
    assert f"speed: {found['line']}\n" in printed and "| read-ahead: 3 | loop |" in printed
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"
    (kept,) = (tmp_path / "cache" / "speed").iterdir()
    assert json.loads(kept.read_text()) == found


def test_candidates_are_what_is_not_written_and_can_run_here(monkeypatch):
    def found(*overrides: str, device: str = "cuda", everything: bool = True) -> list:
        config = load_config("digits_demo", overrides)
        return candidates(config, device, everything=everything)

    def keys(*overrides: str, **options) -> set[str]:
        return {key for rung in found(*overrides, **options) for key in rung.values}

    assert keys(*WRITTEN, device="cpu") == {"data.prefetch"}  # the demo's own file has threads and precision
    assert "meta.precision" in keys("meta.precision=auto", device="cpu")
    assert {"model.fused_batchnorm", "meta.cuda_graph"} <= keys() and "meta.threads" not in keys()
    assert not any(r.values.get("model.fused_batchnorm") for r in found("meta.channels_last=false"))
    # Only these versions of torch free a capture that failed.
    for version, adopted in (("2.13.1", False), ("2.14.0+cu132", True), ("2.15.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        graph = next(r for r in found() if r.name == "CUDA graph")
        assert graph.adopted == adopted == any(r.name == "CUDA graph" for r in found(everything=False))
    # An operator can have been built elsewhere.
    monkeypatch.setattr(rungs, "unavailable", lambda: "no C++ compiler")
    for library in (None, Path("view.so")):
        monkeypatch.setattr(rungs, "kept", lambda library=library: library)
        assert ("data.color_operator" in keys(everything=False)) == (library is not None)


def test_table_and_picture_name_what_is_wrong(tmp_path):
    rows = [
        {"name": "a", "clock": "step", "won": True, "problem": None, "views": 8, "gain": 1.25}
        | {"seconds": {"plain": [1.0, 1.1], "base": [1.0, 1.1], "contender": [0.8, 0.88]}},
        {"name": "b", "clock": "loop", "won": False, "problem": "not done after 60 s"},
    ]
    lines = tune.table(rows)
    assert lines[2] == "| a | step | 840 | 1,050 | 1.25 (1.25 to 1.25) | 1.25 (1.25 to 1.25) | chosen |"
    assert lines[3] == "| b | loop | | | | | not done after 60 s |"
    tune.draw({"rungs": rows, "line": "a, 1.25x plain"}, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000
