"""The network as it trains: what is refused before a first step. What it computes is tested with ranks and captures."""

import pytest
import torch
from torch import nn

from fastsuncet.distributed.ddp import parallel
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError

ALONE = Place(0, 1, 0, torch.device("cpu"))


def compiled():
    return parallel(
        nn.Linear(2, 2), ALONE, compiled=True, static_graph=True, blank=lambda network: network.weight.sum()
    )


def test_a_network_to_be_compiled_where_there_is_no_compiler_is_refused_in_words(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"none of gcc, g\+\+, clang is found.*meta\.compile=false"):
        compiled()


@pytest.mark.parametrize("named", ["gcc", "CXX"])
def test_a_compiler_on_the_path_or_in_the_environment_will_do(named, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    if named == "CXX":
        monkeypatch.setenv("CXX", "/opt/compiler")
    else:
        (tmp_path / named).touch(mode=0o755)
    assert isinstance(compiled(), nn.Module)  # compiles nothing before its first pass
