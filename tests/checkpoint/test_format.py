"""The files of one checkpoint: what they say, and forged ones, of which nothing is run."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import meta_sha256
from fastsuncet.errors import CheckpointError
from tests.support.checkpoints import newest, save


def rewrite_meta(path: Path, change) -> None:
    """Change meta.json as someone would who knows the format: its own hash fits."""
    meta = json.loads((path / "meta.json").read_text())
    del meta["sha256"]
    change(meta)
    (path / "meta.json").write_text(json.dumps(meta | {"sha256": meta_sha256(meta)}))


def forge(path: Path, name: str, payload: bytes) -> None:
    """Replace a file of a checkpoint so that every hash fits."""
    (path / name).write_bytes(payload)
    entry = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    rewrite_meta(path, lambda meta: meta["files"].update({name: entry}))


def test_format_meta_names_the_versions_and_the_files(tmp_path):
    path = save(tmp_path, 12345)
    assert path == tmp_path / "step_00012345"
    assert (tmp_path / "latest").read_text() == "step_00012345\n"
    meta = json.loads((path / "meta.json").read_text())
    assert (meta["step"], meta["format"], meta["ledger"]) == (12345, 1, {"images": 7})
    assert meta["config"] == {"criterion": {"temperature": 0.1}}
    assert meta["versions"]["torch"] == torch.__version__
    assert set(meta["versions"]) >= {"fastsuncet", "python", "dali", "timm"}
    assert meta["files"]["train_state.pt"]["bytes"] == (path / "train_state.pt").stat().st_size
    assert meta["time"].endswith("+00:00")
    assert manager.load(path).meta["config"] == meta["config"]


def test_format_meta_of_tuples_and_int_keys_is_read_back_whole(tmp_path):
    path = save(tmp_path, 1, meta={"sizes": (3, 4), "counts": {10: 1, 9: 2}})
    assert manager.load(path).meta["sizes"] == [3, 4]


@pytest.mark.parametrize(
    ("value", "error"), [(float("nan"), ValueError), (float("inf"), ValueError), ({1}, TypeError)]
)
def test_format_meta_refuses_what_json_cannot_hold(tmp_path, value, error):
    with pytest.raises(error, match="JSON"):
        save(tmp_path, 1, meta={"ledger": {"loss": value}})
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_format_files_follow_the_umask(tmp_path):
    """mkstemp and mkdtemp would make them 0600 and 0700, and a colleague could not load the result."""
    before = os.umask(0o022)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}


class Gadget:
    """Pickled, this is a command; unpickled without weights_only, the command is run."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("name", ["train_state.pt", "model.safetensors"])
@pytest.mark.parametrize("form", ["torch.save", "pickle"])
def test_format_runs_no_code_of_a_forged_checkpoint(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # what many projects tell their users to set
    marker, run = tmp_path / "executed", tmp_path / "run"
    save(run, 1)
    path = save(run, 2)
    if form == "torch.save":
        torch.save({"state": Gadget(marker)}, tmp_path / "forged")
    else:
        (tmp_path / "forged").write_bytes(pickle.dumps({"state": Gadget(marker)}, protocol=2))
    forge(path, name, (tmp_path / "forged").read_bytes())
    with pytest.raises(CheckpointError, match=r"not made by fastsuncet; nothing in it was run") as caught:
        manager.load(path)
    assert "weights_only=False" not in str(caught.value)  # torch's own advice
    step, lines = newest(run)
    assert step == 1
    assert str(path) in lines[0]
    assert not marker.exists()
    if form == "torch.save":
        torch.load(tmp_path / "forged", weights_only=False)
    else:
        pickle.loads((tmp_path / "forged").read_bytes())
    assert marker.exists()  # the gadget works where nothing stops it


def test_format_refuses_a_state_that_is_not_a_dict(tmp_path):
    path = save(tmp_path, 1)
    torch.save([1, 2], tmp_path / "forged")
    forge(path, "train_state.pt", (tmp_path / "forged").read_bytes())
    with pytest.raises(CheckpointError, match="not made by fastsuncet"):
        manager.load(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("step"),
        lambda meta: meta.pop("files"),
        lambda meta: meta.update(files={"model.safetensors": 3, "train_state.pt": []}),
        lambda meta: meta["files"].pop("model.safetensors"),
        lambda meta: meta["files"]["model.safetensors"].pop("sha256"),
        lambda meta: meta["files"].update({"../../secret": meta["files"].pop("train_state.pt")}),
        lambda meta: meta.update(step="2"),
        lambda meta: meta.update(step=True),
    ],
)
def test_format_meta_with_a_fitting_hash_and_wrong_content_is_damage(tmp_path, change):
    save(tmp_path, 1)
    rewrite_meta(save(tmp_path, 2), change)
    assert newest(tmp_path)[0] == 1


@pytest.mark.parametrize("text", ["[]", "3", "null", "[" * 100_000, '{"sha256": {}}', "1" * 5000])
def test_format_meta_of_any_other_shape_is_damage(tmp_path, text):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "meta.json").write_text(text)
    assert newest(tmp_path)[0] == 1


def test_format_notices_a_flipped_bit_anywhere_in_meta(tmp_path):
    """Numbers, keys and values are still good JSON with a bit flipped; only a changed blank can pass."""
    path = save(tmp_path, 2)
    meta = manager.load(path).meta
    content = (path / "meta.json").read_bytes()
    noticed = 0
    indices = range(0, len(content), 3)
    for index in indices:
        flipped = bytearray(content)
        flipped[index] ^= 1 << index % 7
        (path / "meta.json").write_bytes(flipped)
        try:
            assert manager.load(path).meta == meta
        except CheckpointError:
            noticed += 1
    assert noticed > 0.7 * len(indices)


def test_format_that_is_newer_is_refused_and_no_older_one_used(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("fastsuncet.checkpoint.format.FORMAT", 2)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 2, and fastsuncet .* reads format 1"):
        newest(tmp_path)
