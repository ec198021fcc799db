"""What `run.deterministic` asks of torch, for a run on a GPU. The switches are the process's; no GPU is needed."""

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.distributed.launch import Place
from fastsuncet.training.determinism import set_determinism
from tests.support.runs import CONFIGS

CARD = Place(0, 1, 0, torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def switches_put_back(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    cudnn = torch.backends.cudnn
    before = (
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    yield
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = before[:3]
    torch.backends.cuda.matmul.allow_tf32 = before[3]
    torch.use_deterministic_algorithms(before[4], warn_only=before[5])
    torch.utils.deterministic.fill_uninitialized_memory = before[6]


def asked(*changes: str) -> None:
    set_determinism(load_config(CONFIGS / "digits_demo.yaml", changes), CARD)


def test_a_run_on_a_gpu_takes_no_kernel_whose_bits_may_differ():
    asked()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_memory_is_not_filled_before_it_is_written():
    """torch's default under deterministic algorithms: one more pass over every activation of every step."""
    asked()
    address = torch.full((1 << 16,), 7.0).data_ptr()  # given back at once, and most likely handed out again
    fresh = torch.empty(1 << 16)
    assert not fresh.isnan().all(), f"a new tensor (at {fresh.data_ptr() == address}) is all NaN"


def test_who_gives_up_the_bits_gets_the_fastest_kernels_and_still_float32():
    asked("meta.deterministic=false")
    assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.allow_tf32
