"""The files of one checkpoint: every bit comes back, what could not is refused, and nothing forged is run."""

import contextlib
import enum
import hashlib
import io
import json
import os
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import STATE, encode, meta_sha256
from fastsuncet.errors import CheckpointError
from tests.support.archives import Trap
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
    """The files follow the umask: mkstemp would make them 0600, and a colleague could not load the result."""
    before = os.umask(0o022)
    try:
        path = save(tmp_path, 12345)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (path, *path.iterdir())] == [0o755, *[0o644] * 3]
    assert path == tmp_path / "step_00012345"
    assert (tmp_path / "latest").read_text() == "step_00012345\n"
    meta = json.loads((path / "meta.json").read_text())
    assert (meta["step"], meta["format"], meta["ledger"]) == (12345, 1, {"views": 7 * 12345})
    assert meta["config"] == {"criterion": {"temperature": 0.1}}
    assert meta["versions"]["torch"] == torch.__version__
    assert set(meta["versions"]) >= {"fastsuncet", "python", "dali", "timm"}
    assert meta["files"]["train_state.pt"]["bytes"] == (path / "train_state.pt").stat().st_size
    assert meta["time"].endswith("+00:00")
    path = save(tmp_path, 1, meta={"sizes": (3, 4), "counts": {10: 1, 9: 2}})
    assert manager.load(path).meta["sizes"] == [3, 4]


def test_format_meta_refuses_what_json_cannot_hold(tmp_path):
    for value, error in ((float("nan"), ValueError), (float("inf"), ValueError), ({1}, TypeError)):
        with pytest.raises(error, match="JSON"):
            save(tmp_path, 1, meta={"ledger": {"loss": value}})
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.parametrize("name", ["train_state.pt", "model.safetensors"])
@pytest.mark.parametrize("dump", [torch.save, partial(pickle.dump, protocol=2)], ids=["torch.save", "pickle"])
def test_format_runs_no_code_of_a_forged_checkpoint(tmp_path, monkeypatch, name, dump):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # what many projects tell their users to set
    monkeypatch.chdir(tmp_path)
    ran, forged = Path("RAN"), io.BytesIO()
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    dump({"state": Trap()}, forged)
    forge(path, name, forged.getvalue())
    with pytest.raises(CheckpointError, match=r"not made by fastsuncet; nothing in it was run") as caught:
        manager.load(path)
    assert "weights_only=False" not in str(caught.value)  # torch's own advice
    step, lines = newest(tmp_path)
    assert step == 1 and str(path) in lines[0] and not ran.exists()
    with contextlib.suppress(RuntimeError):  # a pickle is no file of torch's, which comes out once it has run
        torch.load(io.BytesIO(forged.getvalue()), weights_only=False)
    assert ran.exists()  # the trap works where nothing stops it
    no_dict = io.BytesIO()
    torch.save([1, 2], no_dict)
    forge(path, "train_state.pt", no_dict.getvalue())
    with pytest.raises(CheckpointError, match="not made by fastsuncet"):
        manager.load(path)


WRONG_META = (
    # Its text; one digit of it, which is still good JSON; or a change whose hash fits.
    *("[]", "null", "[" * 100_000, '{"sha256": {}}', "1" * 5000, ("14", "15")),
    lambda meta: meta.pop("step"),
    lambda meta: meta.pop("files"),
    lambda meta: meta.update(files={"model.safetensors": 3, "train_state.pt": []}),
    lambda meta: meta["files"].pop("model.safetensors"),
    lambda meta: meta["files"]["model.safetensors"].pop("sha256"),
    lambda meta: meta["files"].update({"../../secret": meta["files"].pop("train_state.pt")}),
    lambda meta: meta.update(step="2"),
    lambda meta: meta.update(step=True),
)


@pytest.mark.parametrize("wrong", WRONG_META, ids=range(len(WRONG_META)))
def test_format_meta_of_any_other_content_is_damage(tmp_path, wrong):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    if callable(wrong):
        rewrite_meta(path, wrong)
    else:
        text = (path / "meta.json").read_text()
        (path / "meta.json").write_text(wrong if isinstance(wrong, str) else text.replace(*wrong))
    assert newest(tmp_path)[0] == 1


def test_format_refuses_a_size_that_no_memory_holds(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    rewrite_meta(path, lambda meta: meta["files"]["model.safetensors"].update(bytes=1 << 50))
    os.truncate(path / "model.safetensors", 1 << 40)
    step, lines = newest(tmp_path)
    assert step == 1 and "fit into memory" in lines[0]


def test_format_that_is_newer_is_refused_and_no_older_one_used(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("fastsuncet.checkpoint.format.FORMAT", 2)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 2, and fastsuncet .* reads format 1"):
        newest(tmp_path)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_format_keeps_every_bit_of_a_tensor(tmp_path):
    tensors = {
        "channels last": torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
        "a view": torch.randn(6, 4)[::2, 1:3],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "a number": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "bfloat16": torch.randn(5).bfloat16(),
        "rare numbers": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "NaN payloads": torch.tensor([0x7F800001, 0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        "a parameter": torch.nn.Parameter(torch.randn(3)),
    }
    tensors["a shared layer's second name"] = tensors["a parameter"]  # timm/coat_tiny has some
    save(tmp_path, 1, model=tensors, state=tensors)
    loaded = manager.load_newest(tmp_path)
    # A channels-last momentum that came back contiguous would make every step after a resume slower.
    assert loaded.state["channels last"].stride() == tensors["channels last"].stride()
    for name, tensor in tensors.items():
        for back in (loaded.model[name], loaded.state[name]):
            assert (back.shape, back.dtype, back.requires_grad) == (tensor.shape, tensor.dtype, False), name
            assert bits(back) == bits(tensor.detach()), name
        loaded.model[name].reshape(-1).view(torch.uint8).zero_()  # its own memory, and writable


def test_format_of_a_view_leaves_out_the_buffer_around_it(tmp_path):
    buffer = torch.randn(1_000_000)
    path = save(tmp_path, 1, model={"a": buffer[:10], "b": buffer[10:20]}, state={"c": buffer[20:30]})
    assert sum(file.stat().st_size for file in path.iterdir()) < 10_000


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@given(state=st.dictionaries(st.text(), plain))
def test_format_keeps_any_nest_of_plain_types(state):
    payload = io.BytesIO(encode({}, state)[STATE])
    # repr tells 1 from True, -0.0 from 0.0, tuples from lists, and NaN equals itself.
    assert repr(torch.load(payload, weights_only=True)) == repr(state)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [np.float64(1), np.zeros(2), Color.RED, Path("x")], ids=repr)
def test_format_refuses_what_could_not_be_read_when_the_run_resumes(tmp_path, value):
    """Also what is an int or a float to isinstance."""
    for state in (
        {"optimizer": [{}, {"lr": value}]},
        {"optimizer": {value: 0}} if value is Color.RED else value,
    ):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            save(tmp_path, 1, state={"state": state})
    assert not (tmp_path / "step_00000001").exists()
