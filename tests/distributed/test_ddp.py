"""What is refused before a first step. What the wrapped network computes is tested with ranks and captured steps."""

import os

import pytest
import torch
from torch import nn

from fastsuncet.distributed.ddp import parallel, require_compiler
from fastsuncet.distributed.place import Place
from fastsuncet.errors import ConfigError
from fastsuncet.models.sync_batchnorm import RankBatchNorm
from fastsuncet.training.step import build
from tests.support.methods import CPU, config_of


def wrapped(ranks: int = 1, compiled: bool = True) -> nn.Module:
    place, image = Place(0, ranks, CPU), torch.ones(1, 2)
    options = {"compiled": compiled, "static_graph": True, "blank_pass": lambda net: net(image).sum()}
    return parallel(nn.Linear(2, 2), place, **options)


def test_compiled_network_needs_a_compiler_on_the_path_or_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"none of gcc, g\+\+, clang is found.*meta\.compile=false"):
        wrapped()
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "/opt/compiler")
        require_compiler()
    (tmp_path / "gcc").touch(mode=0o755)
    require_compiler()


def test_compiled_code_is_kept_where_no_other_user_can_put_some(monkeypatch, tmp_path):
    """PyTorch's own place, /tmp/torchinductor_NAME, is known to everybody on the machine."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda network, **_: network)
    for wanted in (str(tmp_path / "inductor"), "/mine"):
        wrapped()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == wanted
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")


def test_ddp_logs_no_times_after_its_first_passes(group):
    """They would be read from the device."""
    network = wrapped(ranks=2, compiled=False)
    for _ in range(100):
        network(torch.ones(1, 2)).sum().backward()
    assert network._get_ddp_logging_data()["iteration"] <= 10


def test_ddp_takes_a_method_with_one_small_crop_an_image(group):
    """BatchNorm of one rank alone needs two rows of each size in the blank passes too."""
    config = config_of("PAWS", "swav.small_crops=1", "model.sync_batchnorm=false")
    model, *_ = build(config, Place(0, 2, CPU), 10, [1] * 10)
    assert not any(isinstance(layer, RankBatchNorm) for layer in model.modules())
