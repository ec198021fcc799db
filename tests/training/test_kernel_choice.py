"""All ranks use the same kernels, proven on the run's own shapes; a continued run obeys what was chosen."""

from dataclasses import replace

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.kernels import self_test
from fastsuncet.losses import contrast_kernel
from fastsuncet.models import norm_kernel
from fastsuncet.optim import lars_kernel
from fastsuncet.training import kernel_choice
from pipelines.cuda_compiler import KernelError
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, small_config

CARD = torch.device("cuda", 0)
HERE = torch.device("cpu")
DATA = ("data.root=none", "meta.precision=bf16", "data.split.file=none")


@pytest.fixture(autouse=True)
def _no_verdicts(monkeypatch):
    monkeypatch.setattr(self_test, "_reasons", {})


def paper(world_size, *overrides):
    config = load_config(CONFIGS / "in1k_10pct.yaml", [*DATA, *overrides])
    return config, config.resolve(world_size, 1_281_167, 1000, 128_000)


@pytest.mark.slow
def test_prove_gives_each_proof_the_shapes_of_the_runs_own_step(monkeypatch):
    """With labeled images and, once supervision is off, without."""
    asked = {}
    for module in (lars_kernel, contrast_kernel, norm_kernel):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "prove", lambda device, name=name, **given: asked.update({name: given}))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: torch.no_grad())
    config, sizes = paper(64)
    assert kernel_choice.prove(config, sizes, CARD) == dict.fromkeys(["lars.cu", "contrast.cu", "norm.cu"])
    shapes = asked["norm_kernel"]["shapes"]
    assert {(88, 64, 112, 112), (128, 64, 112, 112), (88, 2048, 7, 7)} <= set(shapes)
    assert {shape[0] for shape in shapes} == {88, 128} and len(shapes) == 2 * 12
    assert asked["norm_kernel"]["dtypes"] == [torch.bfloat16]
    assert asked["contrast_kernel"]["keys"] == [5632, 2560]
    assert sum(asked["lars_kernel"]["sizes"]) == 23_508_032 + 4_458_624
    pieces = kernel_choice.norm_shapes(*paper(64, "criterion.micro_batch=4096"))
    assert {shape[0] for shape in pieces} == {44, 64}  # 2 x 22 views, and 20 labeled images with them
    # One process has no statistics to join, and its BatchNorm is not fused.
    assert "norm.cu" not in kernel_choice.prove(*paper(1), CARD)
    assert "norm.cu" in kernel_choice.prove(*paper(1, "model.fused_batchnorm=true"), CARD)
    # The head's activations are rows of channels in any memory format.
    shared = ("model.head_batchnorm=true", "meta.channels_last=false")
    assert "norm.cu" in kernel_choice.prove(*paper(64, *shared), CARD)
    assert "norm.cu" not in kernel_choice.prove(*paper(64, shared[1]), CARD)


def test_prove_asks_nothing_of_a_cpu(tmp_path):
    config = small_config(tmp_path)
    assert kernel_choice.prove(config, config.resolve(1, 1442, 10, 144), HERE) == {}


def vote(rank, world_size):
    """Rank 1 has no compiler; the other kernel runs everywhere."""
    place = Place(rank, world_size, 0, CARD)
    own = {"lars.cu": "no NVRTC" if rank == 1 else None, "contrast.cu": None}
    joined = kernel_choice.agree(place, own)

    def untouched(device):
        raise AssertionError

    return joined, [self_test.agrees(source, CARD, untouched) for source in own]


@pytest.mark.slow
def test_kernel_that_one_rank_cannot_use_is_used_by_none():
    for joined, used in run_ranks(vote, 2):
        assert joined == {"lars.cu": "rank 1: no NVRTC", "contrast.cu": None}
        assert used == [False, True]


def test_continued_run_obeys_what_was_chosen():
    now = {"lars.cu": None, "contrast.cu": None, "norm.cu": "no NVRTC"}
    before = {"lars.cu": False, "norm.cu": True}
    verdicts, lost = kernel_choice.obey(now, before, CARD)
    assert lost == ["norm.cu"] and verdicts["contrast.cu"] is None
    assert verdicts["lars.cu"] == self_test._reasons["lars.cu", CARD] == "the run was started without it"
    assert kernel_choice.obey({}, {"lars.cu": True}, HERE) == ({}, [])  # moved to a CPU


def test_why_not_reports_failed_proofs_and_too_little_memory(monkeypatch):
    def proof(error):
        def prove(device):
            raise error

        return prove

    assert self_test.why_not("x.cu", HERE, proof(KernelError("differs"))) == "differs"
    reason = self_test.why_not("x.cu", HERE, proof(torch.OutOfMemoryError()))
    assert reason == "the device has too little memory for the proof of x.cu"
    monkeypatch.setenv("FASTSUNCET_KERNELS", "off")
    assert self_test.why_not("x.cu", HERE, proof(AssertionError())) == "FASTSUNCET_KERNELS is off"


def test_describe_names_what_runs(tmp_path):
    config, _ = paper(1, "model.fused_batchnorm=true")
    verdicts = {"lars.cu": None, "contrast.cu": None, "norm.cu": "rank 1: no NVRTC"}
    assert kernel_choice.describe(config, verdicts) == "lars.cu, contrast.cu; not norm.cu: rank 1: no NVRTC"
    assert "model.fused_batchnorm has no effect" in kernel_choice.describe(config, {})
    for words, silent in (
        (("meta.compile=true",), False),
        (("meta.compile=true", "meta.autotune=true"), True),
    ):
        assert (
            "Inductor does not time" not in kernel_choice.describe(paper(1, *words)[0], verdicts)
        ) == silent


def test_batch_that_overflows_batchnorms_index_is_refused():
    """2,674 views of 64 x 112 x 112 activations are the last that 32 bits count."""
    config, sizes = paper(1, "criterion.supervised_epochs=0", "data.split.kind=none", "data.split.file=null")
    few, many = (replace(sizes, local_unlabeled=n) for n in (1337, 1338))
    refused = r"2,676 views at a time.*\(2676, 64, 112, 112\).*2,674 views at most"
    kernel_choice.check_int32(config, few, CARD, {})
    kernel_choice.check_int32(config, many, HERE, {})
    with pytest.raises(ConfigError, match=refused):
        kernel_choice.check_int32(config, many, CARD, {})
    fused = config.with_values({"model.fused_batchnorm": True})
    kernel_choice.check_int32(fused, many, CARD, {"norm.cu": None})
    with pytest.raises(ConfigError, match=refused):  # torch's takes the place of kernels that are not used
        kernel_choice.check_int32(fused, many, CARD, {"norm.cu": "no NVRTC"})
    without = config.with_values({"model.name": "timm/test_vit"})
    kernel_choice.check_int32(without, many, CARD, {})
