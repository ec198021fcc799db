"""The switches of torch for a run on a GPU. They are the process's; no GPU is needed."""

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.distributed.launch import Place
from fastsuncet.training.determinism import set_determinism
from tests.support.runs import CONFIGS

CARD = Place(0, 1, 0, torch.device("cuda", 0))
CUDNN, MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul


SWITCHES = (
    *((CUDNN, name) for name in ("benchmark", "deterministic", "allow_tf32")),
    (MATMUL, "allow_tf32"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
)


@pytest.fixture(autouse=True)
def restored_switches(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = [getattr(owner, name) for owner, name in SWITCHES]
    exact = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    for (owner, name), value in zip(SWITCHES, before):
        setattr(owner, name, value)
    torch.use_deterministic_algorithms(exact, warn_only=warn_only)


@pytest.mark.parametrize("exact", [True, False])
def test_set_determinism_chooses_exact_or_fastest_kernels_without_tf32(exact):
    set_determinism(load_config(CONFIGS / "digits_demo.yaml", [f"meta.deterministic={exact}"]), CARD)
    assert CUDNN.deterministic == torch.are_deterministic_algorithms_enabled() == exact
    assert CUDNN.benchmark != exact
    assert not CUDNN.allow_tf32 and not MATMUL.allow_tf32


def test_set_determinism_leaves_new_memory_unfilled():
    """torch's default under deterministic algorithms is one more pass over every activation of every step."""
    set_determinism(load_config(CONFIGS / "digits_demo.yaml"), CARD)
    address = torch.full((1 << 16,), 7.0).data_ptr()  # freed at once, and most likely allocated again
    fresh = torch.empty(1 << 16)
    assert not fresh.isnan().all(), f"a new tensor (at {fresh.data_ptr() == address}) is all NaN"
