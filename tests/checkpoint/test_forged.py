"""Checkpoints somebody else made: nothing in them is run, and what makes no sense is damage."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from fastsuncet.checkpoint import atomic_files, manager
from fastsuncet.checkpoint import format as snapshot
from fastsuncet.errors import CheckpointError
from tests.support.checkpoints import newest, save


class Gadget:
    """Pickled, this is a command; unpickled without weights_only, it is run."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def forge(path: Path, name: str, payload: bytes) -> None:
    """Puts a file into a checkpoint as somebody would who knows the format: every hash fits."""
    meta = json.loads((path / "meta.json").read_text())
    del meta["sha256"]
    (path / name).unlink()
    meta["files"][name] = {"bytes": len(payload), "sha256": atomic_files.write_synced(path / name, payload)}
    meta["sha256"] = snapshot._own_sha256(meta)
    (path / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("name", ["train_state.pt", "model.safetensors"])
@pytest.mark.parametrize("form", ["torch.save", "pickle"])
def test_no_code_in_a_forged_checkpoint_is_run(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # what many projects tell their users to set
    marker, run = tmp_path / "executed", tmp_path / "run"
    save(run, 1)
    path = save(run, 2)
    if form == "torch.save":
        torch.save({"state": Gadget(marker)}, tmp_path / "forged")
    else:
        (tmp_path / "forged").write_bytes(pickle.dumps({"state": Gadget(marker)}, protocol=2))
    forge(path, name, (tmp_path / "forged").read_bytes())
    with pytest.raises(CheckpointError, match=r"not made by fastsuncet") as caught:
        manager.load(path)
    assert "nothing in it was run" in str(caught.value)
    assert "weights_only=False" not in str(caught.value)  # torch's own advice
    step, lines = newest(run)
    assert step == 1
    assert str(path) in lines[0]
    assert not marker.exists()
    torch.load(tmp_path / "forged", weights_only=False) if form == "torch.save" else pickle.loads(
        pickle.dumps(Gadget(marker))
    )
    assert marker.exists()  # it would have been


def test_a_state_that_is_no_dict_is_refused(tmp_path):
    path = save(tmp_path, 1)
    torch.save([1, 2], tmp_path / "forged")
    forge(path, "train_state.pt", (tmp_path / "forged").read_bytes())
    with pytest.raises(CheckpointError, match="not made by fastsuncet"):
        manager.load(path)


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
def test_a_meta_json_that_vouches_for_itself_and_makes_no_sense_is_damage(tmp_path, change):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    meta = json.loads((path / "meta.json").read_text())
    del meta["sha256"]
    change(meta)
    (path / "meta.json").write_text(json.dumps(meta | {"sha256": snapshot._own_sha256(meta)}))
    assert newest(tmp_path)[0] == 1


@pytest.mark.parametrize("text", ["[]", "3", "null", "[" * 100_000, '{"sha256": {}}', "1" * 5000])
def test_a_meta_json_of_any_other_shape_is_damage(tmp_path, text):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "meta.json").write_text(text)
    assert newest(tmp_path)[0] == 1
