"""What goes into a checkpoint comes out bit for bit, and what could not come out is refused."""

import enum
import io
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import STATE, encode
from fastsuncet.checkpoint.serialization import plain_state
from tests.support.checkpoints import save


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(6, 4)[::2, 1:3],
        torch.randn(3, 1).expand(3, 4),
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.randn(5).bfloat16(),
        torch.randn(5).half(),
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.tensor([0x7F800001, 0x7FC00001, -1], dtype=torch.int32).view(torch.float32),  # NaN payloads
        torch.nn.Parameter(torch.randn(3)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}",
)
def test_serialization_keeps_every_bit_of_a_tensor(tmp_path, tensor):
    save(tmp_path, 1, model={"x": tensor}, state={"x": tensor})
    loaded = manager.load_newest(tmp_path)
    for back in (loaded.model["x"], loaded.state["x"]):
        assert (back.shape, back.dtype, back.requires_grad) == (tensor.shape, tensor.dtype, False)
        assert bits(back) == bits(tensor.detach())
    # A channels-last momentum that came back contiguous would make every step after a resume slower.
    if tensor.dim() == 4:
        assert loaded.state["x"].stride() == tensor.stride()
    if tensor.numel():
        loaded.model["x"].view(-1).view(torch.uint8).zero_()  # its own memory, and writable


def test_serialization_of_a_view_leaves_out_the_buffer_around_it(tmp_path):
    buffer = torch.randn(1_000_000)
    path = save(tmp_path, 1, model={"a": buffer[:10], "b": buffer[10:20]}, state={"c": buffer[20:30]})
    assert sum(file.stat().st_size for file in path.iterdir()) < 10_000
    loaded = manager.load(path)
    assert torch.equal(loaded.model["b"], buffer[10:20])
    assert torch.equal(loaded.state["c"], buffer[20:30])


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=15)
@given(state=st.dictionaries(st.text(), plain))
def test_serialization_keeps_any_nest_of_plain_types(state):
    payload = io.BytesIO(encode({}, state)[STATE])
    # repr tells 1 from True, -0.0 from 0.0, tuples from lists, and NaN equals itself.
    assert repr(torch.load(payload, weights_only=True)) == repr(state)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        *(np.float64(1), np.int64(1), np.zeros(2), Color.RED, {1, 2}, b"bytes", 1j, torch.float32),
        *(Path("x"), lambda: 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_serialization_refuses_what_could_not_be_read_with_its_path(tmp_path, value):
    """weights_only would refuse these, also those that are int or float to isinstance, when the run resumes."""
    where = rf"state\['optimizer'\]\['groups'\]\[1\]\['lr'\] is a .*{type(value).__name__}"
    with pytest.raises(TypeError, match=where):
        save(tmp_path, 1, state={"optimizer": {"groups": [{}, {"lr": value}]}})
    with pytest.raises(TypeError, match=r"the key .* of state\['a'\] is a numpy\.int64"):
        save(tmp_path, 1, state={"a": {np.int64(3): 0}})
    assert not (tmp_path / "step_00000001").exists()


def test_serialization_of_kinds_of_dicts_gives_plain_dicts():
    assert (
        repr(plain_state({"a": OrderedDict(b=1), "c": defaultdict(int, d=2)}))
        == "{'a': {'b': 1}, 'c': {'d': 2}}"
    )


@pytest.mark.parametrize(
    "value", [3, None, torch.eye(2).to_sparse(), torch.zeros(2, device="meta")], ids=repr
)
def test_serialization_of_a_model_refuses_what_is_not_a_dense_tensor(tmp_path, value):
    with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError)):
        save(tmp_path, 1, model={"x": value})
    assert not (tmp_path / "step_00000001").exists()


def test_serialization_refuses_two_names_of_one_tensor(tmp_path):
    weight = torch.randn(10, 4)
    with pytest.raises(RuntimeError, match=r"share memory.*(embed|tied)"):
        save(tmp_path, 1, model={"embed": weight, "tied": weight})
    assert not (tmp_path / "step_00000001").exists()
