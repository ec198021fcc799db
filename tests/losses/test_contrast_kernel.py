"""contrast.cu, built for the CPU with a real thread for each of CUDA's; test_contrast.py has its values."""

import pytest
import torch

from fastsuncet.losses import contrast, contrast_kernel
from pipelines.cuda_compiler import KernelError
from tests.support.host_kernels import on_the_host


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(contrast_kernel):
        yield


def test_row_pass_shows_a_nan_in_the_loss():
    logits = torch.zeros(2, 6)
    logits[0, 4] = torch.nan
    values, _ = contrast_kernel.row_pass(torch.arange(6) % 3, False)(logits, 0, torch.ones(2))
    assert values.isnan().tolist() == [True, False]


def test_contrast_proof_fails_when_kernel_and_twin_differ(monkeypatch):
    monkeypatch.setattr(contrast_kernel, "STAGED", 40)
    here = torch.device("cpu")
    contrast_kernel.prove(here, contrast.row_pass)
    with pytest.raises(KernelError, match="contrastive"):
        contrast_kernel.prove(here, lambda ids, every: contrast.row_pass(ids, not every))
