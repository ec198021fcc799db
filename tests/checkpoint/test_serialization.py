"""What goes into a checkpoint comes out bit for bit, and what could not come out does not go in."""

import enum
import json
import math
import os
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsuncet.checkpoint import manager
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
        torch.tensor([0x7F800001, 0x7FC00001, -1], dtype=torch.int32).view(
            torch.float32
        ),  # NaNs with a payload
        torch.nn.Parameter(torch.randn(3)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}",
)
def test_every_tensor_comes_back_with_the_same_bits_whatever_its_strides(tmp_path, tensor):
    save(tmp_path, 1, model={"x": tensor}, state={"x": tensor})
    loaded = manager.load_newest(tmp_path)
    for back in (loaded.model["x"], loaded.state["x"]):
        assert back.shape == tensor.shape
        assert back.dtype == tensor.dtype
        assert bits(back) == bits(tensor.detach())
        assert not back.requires_grad
    if tensor.numel():
        loaded.model["x"].view(-1).view(torch.uint8).zero_()  # its own memory, and writable


def test_optimizer_tensors_come_back_with_their_strides(tmp_path):
    """A channels-last momentum that came back NCHW would make every step after a resume slower."""
    momentum = torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)
    save(tmp_path, 1, state={"momentum": momentum})
    assert manager.load_newest(tmp_path).state["momentum"].stride() == momentum.stride()


def test_a_window_into_a_large_buffer_does_not_take_the_buffer_along(tmp_path):
    buffer = torch.randn(1_000_000)
    path = save(tmp_path, 1, model={"a": buffer[:10], "b": buffer[10:20]}, state={"c": buffer[20:30]})
    assert sum(file.stat().st_size for file in path.iterdir()) < 10_000
    loaded = manager.load(path)
    assert torch.equal(loaded.model["b"], buffer[10:20])
    assert torch.equal(loaded.state["c"], buffer[20:30])


def test_a_network_and_its_optimizer_continue_as_if_never_stopped(tmp_path):
    def build():
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 2)
        ).to(memory_format=torch.channels_last)
        return network, torch.optim.AdamW(network.parameters(), lr=1e-2)

    def step(network, optimizer, number):
        images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        network(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    network, optimizer = build()
    for number in range(3):
        step(network, optimizer, number)
    save(tmp_path, 3, model=network.state_dict(), state={"optimizer": optimizer.state_dict()})
    again, again_optimizer = build()
    loaded = manager.load_newest(tmp_path)
    again.load_state_dict(loaded.model)
    again_optimizer.load_state_dict(loaded.state["optimizer"])
    for number in range(3, 6):
        step(network, optimizer, number)
        step(again, again_optimizer, number)
    for (name, one), other in zip(network.state_dict().items(), again.state_dict().values()):
        assert bits(one) == bits(other), name


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=30, deadline=None)
@given(state=st.dictionaries(st.text(), plain))
def test_any_nest_of_plain_types_comes_back_equal(state, tmp_path_factory):
    path = save(tmp_path_factory.mktemp("run"), 1, state=state)
    # repr tells 1 from True, -0.0 from 0.0, tuples from lists, and NaN equals itself.
    assert repr(manager.load(path).state) == repr(state)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1), "numpy.float64"),
        (np.int64(1), "numpy.int64"),
        (np.zeros(2), "numpy.ndarray"),
        (Colour.RED, "Colour"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (torch.float32, "torch.dtype"),
        (torch.Size([1]), "torch.Size"),
        (defaultdict(int), "collections.defaultdict"),
        (Path("x"), "Path"),
        (lambda: 0, "function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_could_not_be_read_back_is_refused_with_its_path(tmp_path, value, kind):
    """np.float64 is a float and IntEnum an int to isinstance; weights_only refuses both, at the resume."""
    with pytest.raises(TypeError, match=rf"state\['optimizer'\]\['groups'\]\[1\]\['lr'\] is a .*{kind}"):
        save(tmp_path, 1, state={"optimizer": {"groups": [{}, {"lr": value}]}})
    assert not (tmp_path / "step_00000001").exists()


def test_keys_that_could_not_be_read_back_are_refused_with_their_path(tmp_path):
    with pytest.raises(TypeError, match=r"state\['a'\] has the key \(1, 2\), a tuple"):
        save(tmp_path, 1, state={"a": {(1, 2): 0}})
    with pytest.raises(TypeError, match=r"meta\['ledger'\] has the key 3, a int: JSON has str keys"):
        save(tmp_path, 1, meta={"ledger": {3: 0}})


def test_an_ordered_dict_is_stored_as_the_dict_it_is(tmp_path):
    save(tmp_path, 1, state=OrderedDict(b=1, a=2))
    assert list(manager.load_newest(tmp_path).state.items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("value", [float("nan"), math.inf])
def test_meta_that_json_has_no_word_for_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"meta\['ledger'\]\['loss'\] is (nan|inf)"):
        save(tmp_path, 1, meta={"ledger": {"loss": value}})


@pytest.mark.parametrize("key", ["step", "sha256", "files", "versions"])
def test_meta_cannot_say_what_a_checkpoint_says_itself(tmp_path, key):
    with pytest.raises(ValueError, match=key):
        save(tmp_path, 1, meta={key: 1})


@pytest.mark.parametrize(
    "value", [3, "x", None, torch.eye(2).to_sparse(), torch.zeros(2, device="meta")], ids=repr
)
def test_a_model_holds_dense_tensors_and_nothing_else(tmp_path, value):
    with pytest.raises(TypeError, match=r"model\['x'\]"):
        save(tmp_path, 1, model={"x": value})


def test_tensors_that_share_memory_are_refused_by_name_and_neighbours_are_not(tmp_path):
    weight = torch.randn(10, 4)
    with pytest.raises(ValueError, match=r"'(embed|tied)' and '(embed|tied)' share memory"):
        save(tmp_path, 1, model={"embed": weight, "other": torch.randn(3), "tied": weight.t()})
    with pytest.raises(
        ValueError, match="share memory"
    ):  # the first covers the third, not only its neighbour
        save(tmp_path, 1, model={"all": weight, "early": weight[:2].clone(), "late": weight[8:]})
    with pytest.raises(ValueError, match=r"'all' and 'late' share memory"):
        save(tmp_path, 1, model={"late": weight[8:], "other": torch.randn(3), "all": weight})
    # Rows of one are columns of none: a span is refused as a whole, for it could be proved apart only bit by bit.
    with pytest.raises(ValueError, match="share memory"):
        save(tmp_path, 1, model={"left": weight[:, :2], "right": weight[:, 2:]})
    save(tmp_path, 1, model={"first": weight[:5], "second": weight[5:], "none": weight[:0]})
    assert torch.equal(manager.load_newest(tmp_path).model["second"], weight[5:])


def test_meta_says_what_wrote_it_and_what_it_holds(tmp_path):
    path = save(tmp_path, 12345)
    assert path == tmp_path / "step_00012345"
    assert (tmp_path / "latest").read_text() == "step_00012345\n"
    meta = json.loads((path / "meta.json").read_text())
    assert meta["step"] == 12345
    assert meta["format"] == 1
    assert meta["config"] == {"criterion": {"temperature": 0.1}}
    assert meta["ledger"] == {"images": 7}
    assert meta["versions"]["torch"] == torch.__version__
    assert set(meta["versions"]) >= {"fastsuncet", "python", "dali", "timm"}
    assert meta["files"]["train_state.pt"]["bytes"] == (path / "train_state.pt").stat().st_size
    assert meta["time"].endswith("+00:00")
    assert manager.load(path).meta["config"] == meta["config"]


def test_the_files_can_be_read_by_whoever_may_read_the_users_other_files(tmp_path):
    """mkstemp and mkdtemp would make them 0600 and 0700, and a colleague could not load the result."""
    before = os.umask(0o022)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}
