"""The metrics files: one line a record, the same bytes after a restart, and nothing lost to a kill."""

import json
import math
import os
import resource
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastsuncet.config import load_config
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.writer import MetricsWriter, read

COLUMNS = ("nt_xent", "suncet", "lr")
CONFIG = load_config("digits_demo")  # without a tracker


def record(step: int) -> dict:
    return {"step": step, "nt_xent": 5 / (step + 3), "suncet": torch.tensor(1 / (step + 1)), "lr": 0.1 * step}


def run(folder: Path, first: int, last: int, **options) -> list[str]:
    """Write the steps after `first` up to `last`, and KNN at every third; return what the writer printed."""
    said = []
    with MetricsWriter(folder, COLUMNS, CONFIG, say=said.append, **options) as writer:
        for step in range(first + 1, last + 1):
            writer.write(record(step))
            if step % 3 == 0:
                writer.write({"step": step, "accuracy": step / 7}, kind="knn")
    return said


def files_of(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "metrics.jsonl").read_bytes(), (folder / "metrics.csv").read_bytes()


def superseded(folder: Path) -> list[dict]:
    path = folder / "metrics.superseded.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_writer_writes_a_record_as_a_line_and_a_row(tmp_path):
    with MetricsWriter(tmp_path, COLUMNS, CONFIG) as writer:
        for step in (1, 2):  # another program can read each at once
            writer.write(record(step))
            assert [len(content.splitlines()) for content in files_of(tmp_path)] == [step, 1 + step]
    run(tmp_path, 2, 3, resume_step=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(line)[:2] for line in lines] == [["step", "kind"]] * 4
    assert [line["kind"] for line in lines] == ["train", "train", "train", "knn"]
    head, row, *more = files_of(tmp_path)[1].splitlines()
    assert (head, row, len(more)) == (b"step,nt_xent,suncet,lr", b"1,1.25,0.5,0.1", 2)


@given(values=st.lists(st.floats(), max_size=20))
@example(values=[math.nan, math.inf, -math.inf])
def test_writer_keeps_the_bits_of_every_float_in_both_files(values, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with MetricsWriter(folder, ("x",), CONFIG) as writer:
        for step, value in enumerate(values):
            writer.write({"step": step, "x": value})
            writer.write({"step": step, "y": value}, kind="knn")
    text = (folder / "metrics.jsonl").read_text()
    # Other programs know no NaN and no Infinity.
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    for value, train, knn in zip(values, lines[::2], lines[1::2]):
        finite = math.isfinite(value)
        assert repr(train["x"]) == repr(knn["y"]) == repr(value if finite else None)
        assert train.get("nonfinite") == (None if finite else {"x": str(value)})
    cells = [line.split(",")[1] for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    for kind, key in (("train", "x"), ("knn", "y")):
        assert [repr(back[key]) for back in read(folder / "metrics.jsonl", kind)] == list(map(repr, values))
    assert [repr(float(cell)) for cell in cells] == list(map(repr, values))


def test_writer_returns_plain_numbers_and_refuses_a_key_that_is_not_a_column(tmp_path):
    values = {"nt_xent": torch.tensor(0.1), "suncet": np.float32(0.1), "lr": np.float64(0.1)}
    with MetricsWriter(tmp_path, COLUMNS, CONFIG) as writer:
        with pytest.raises(KeyError, match="nt_cent: not among the columns"):
            writer.write({"step": 1, "nt_cent": 1.0})
        assert files_of(tmp_path) == (b"", b"step,nt_xent,suncet,lr\n")
        shown = writer.write({"step": np.int64(3), **values})
    assert shown == {"step": 3, "nt_xent": 0.10000000149011612, "suncet": 0.10000000149011612, "lr": 0.1}
    assert {type(value) for value in shown.values()} == {int, float}
    assert read(tmp_path / "metrics.jsonl") == [{**shown, "kind": "train"}]


@pytest.mark.parametrize("stop", range(8))
def test_restart_from_any_step_ends_with_the_files_of_an_unbroken_run(tmp_path, stop):
    run(tmp_path / "undisturbed", 0, 10)
    run(tmp_path / "run", 0, 7)
    said = run(tmp_path / "run", stop, 10, resume_step=stop)
    assert files_of(tmp_path / "run") == files_of(tmp_path / "undisturbed")
    undone = [line["step"] for line in superseded(tmp_path / "run") if line["kind"] == "train"]
    assert undone == list(range(stop + 1, 8)) and len(said) == (stop < 7)


def test_restart_keeps_and_reports_every_line_that_it_undid(tmp_path):
    run(tmp_path, 0, 6)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    moved = tmp_path / "metrics.superseded.jsonl"
    said = run(tmp_path, 2, 4, resume_step=2)
    assert moved.read_bytes() == b"".join(before[2:])
    assert said == [f"metrics: continuing from step 2; 6 later lines moved to {moved}"]
    said = run(tmp_path, 3, 4, resume_step=3)  # a second restart adds to the file
    assert said == [f"metrics: continuing from step 3; 1 later line moved to {moved}"]
    assert [line["step"] for line in superseded(tmp_path)] == [3, 3, 4, 5, 6, 6, 4]
    said = run(tmp_path, 0, 1)  # without a step, all lines go
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1]
    assert "a fresh start; 5 later lines" in said[0] and len(superseded(tmp_path)) == 12
    path = tmp_path / "deleted" / "metrics.jsonl"
    assert run(path.parent, 2, 3, resume_step=2) == [
        f"metrics: {path} is missing, and with it the lines up to step 2"
    ]


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_restart_moves_lines_that_are_not_records_aside(tmp_path, cut):
    """Also a last line that kill -9 or a full disk cut, where only its end is missing too."""
    garbage = [b"\0" * 30, b"[1]", b"null", b'{"step": "3", "kind": "x"}', b'{"step": 1}', b"\xff\xfe", b""]
    garbage += [b"[" * 100_000]
    run(tmp_path, 0, 3)
    one, *others, last = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = one + b"\n".join([*garbage, b"".join(others) + last[:cut]])
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    (tmp_path / "metrics.csv").write_bytes(files_of(tmp_path)[1][:30])
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl", "train")] == [1, 2, 3]
    (said,) = run(tmp_path, 3, 3, resume_step=3)
    lines, rows = files_of(tmp_path)
    assert lines == one + b"".join(others) and len(rows.splitlines()) == 4
    torn = [*(each + b"\n" for each in garbage), last[:cut]]
    moved = [{"torn": line.decode("utf-8", "backslashreplace")} for line in torn]
    assert superseded(tmp_path) == moved and "; 9 damaged lines moved" in said


def test_restart_that_is_killed_loses_no_line(tmp_path, monkeypatch):
    run(tmp_path, 0, 4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            MetricsWriter(tmp_path, COLUMNS, CONFIG, resume_step=2, say=lambda line: None)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run(tmp_path, 2, 2, resume_step=2)
    assert {line["step"] for line in superseded(tmp_path)} == {3, 4}


def test_restart_rebuilds_the_table_with_the_current_columns(tmp_path):
    run(tmp_path, 0, 2)
    with MetricsWriter(tmp_path, ("lr", "wait"), CONFIG, resume_step=2) as writer:
        writer.write({"step": 3, "wait": 0.5})
    assert files_of(tmp_path)[1] == b"step,lr,wait\n1,0.1,\n2,0.2,\n3,,0.5\n"


def test_restart_holds_one_line_of_a_long_file_at_a_time(tmp_path):
    run(tmp_path, 0, 40)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(100 * path.read_bytes())
    tracemalloc.start()
    run(tmp_path, 40, 40, resume_step=40)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2 * most < path.stat().st_size


def test_writer_on_a_full_disk_raises_checkpoint_error_with_the_reason(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = MetricsWriter(tmp_path, COLUMNS, CONFIG)
    writer.write(record(0))
    writer.write(record(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 20, limits[1]))
    try:
        said = rf"{tmp_path} cannot be written: .*File too large.*ulimit"
        with pytest.raises(CheckpointError, match=said):
            writer.write(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()  # has nothing left to write
    run(tmp_path, 1, 3, resume_step=1)
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl", "train")] == [0, 1, 2, 3]
