"""A result is one file: written atomically, replaced when the evaluation is repeated, checked when it is read."""

import json
import os
from unittest import mock

import pytest

from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.results import read_results, write_result


def record(**changes) -> dict:
    source = "runs/a/checkpoints/step_00000010"
    return {
        "kind": "knn",
        "metrics": {"top1": 0.5, "top1_weighted": 0.52},
        "images": 360,
        "labels": {"kind": "bernoulli", "fraction": 0.1, "count": 147},
        "encoder": {"source": source, "step": 10, "epoch": 2.5, "method": "SimCLR"},
        "setting": {"k": 10},
        "run": "a",
        "versions": {"torch": "2.15.0"},
    } | changes


def test_results_are_read_back_in_order_of_their_names(tmp_path):
    records = [record(kind=kind) for kind in ("npi", "accuracy", "linear")]
    for one in records:
        write_result(tmp_path, one)
    assert read_results(tmp_path) == [records[1], records[2], records[0]]
    assert read_results(tmp_path / "nothing here") == []


def test_results_of_a_repeated_evaluation_replace_the_old_ones(tmp_path, monkeypatch):
    first = write_result(tmp_path, record())
    assert first.parent == tmp_path / "results"
    assert first.name.startswith("knn-bernoulli-0.1-step00000010-")
    again = record(metrics={"top1": 0.75}, versions={"torch": "2.16.0"})
    assert write_result(tmp_path, again) == first
    assert read_results(tmp_path) == [again]
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left"):
        write_result(tmp_path, record())
    assert read_results(tmp_path) == [again]


def test_results_of_another_evaluation_get_another_file(tmp_path):
    different = [
        {"kind": "npi"},
        {"setting": {"k": 20}},
        {"labels": {"kind": "bernoulli", "fraction": 0.1, "count": 148}},
        {"encoder": {"source": "runs/b/checkpoints/step_00000010", "step": 10}},
        {"encoder": {"source": "runs/a/checkpoints/step_00000010", "step": 20}},
    ]
    files = {write_result(tmp_path, record(**changes)) for changes in ({}, *different)}
    assert len(files) == 1 + len(different)


def test_results_keep_their_names_wherever_the_run_is_named_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    near = write_result(tmp_path / "a", record(encoder={"source": "a/checkpoints/step_00000010", "step": 10}))
    source = str(tmp_path / "a" / "checkpoints" / "step_00000010")
    assert write_result(tmp_path / "a", record(encoder={"source": source, "step": 10})).name == near.name


def test_results_refuse_to_write_a_wrong_record(tmp_path):
    for changes in ({"images": 0}, {"setting": {"k": float("nan")}}):
        with pytest.raises(ValueError):
            write_result(tmp_path, record(**changes))
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kind": "guess"}, "kind: .*'finetune', 'knn', 'npi'"),
        ({"metrics": {}}, "metrics"),
        ({"metrics": {"top1": float("nan")}}, "metrics.top1: .*finite"),
        ({"images": 0}, "images: .*greater than 0"),
        ({"encoder": {"step": "10"}}, "encoder.step: .*valid integer"),
        ({"labels": {"fraction": "half"}}, "labels.fraction: .*valid number"),
        (b"", "Expecting"),
        (b"[1, 2]", "dictionary"),
        (b'{"kind": "knn"}', "metrics: Field required"),
        (b"\xff\xfe\x00", "decode"),
        (b"[" * 100_000, "recursion"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_results_name_a_damaged_file_and_what_is_wrong(tmp_path, content, said):
    path = write_result(tmp_path, record())
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(record(**content)).encode())
    with pytest.raises(CheckpointError, match=f"{path} .*{said}"):
        read_results(tmp_path)
