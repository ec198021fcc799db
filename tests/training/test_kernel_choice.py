"""All ranks use the same kernels, proven on the run's own shapes; a continued run obeys what was chosen."""

from dataclasses import replace

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.kernels import self_test
from fastsuncet.models import norm_kernel
from fastsuncet.training import kernel_choice
from pipelines.cuda_compiler import KernelError
from tests.support.emulated_norm import FAULTS, emulated
from tests.support.host_kernels import on_the_host
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS

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
def test_trials_have_the_shapes_of_the_runs_own_step():
    """With labeled images and, once supervision is off, without."""
    trials = kernel_choice.trials(*paper(64))
    assert set(trials) == {"lars.cu", "contrast.cu", "norm.cu", "view.cu"}
    dtype, modes, shapes = trials["norm.cu"].shapes
    assert {(88, 64, 112, 112), (128, 64, 112, 112), (88, 2048, 7, 7)} <= set(shapes)
    assert {shape[0] for shape in shapes} == {88, 128} and len(shapes) == 2 * 12
    assert (dtype, modes) == ("torch.bfloat16", {"fused": True, "shared": True})
    assert trials["norm.cu"].prove.keywords == {"shapes": shapes, "dtypes": [torch.bfloat16]}
    assert trials["contrast.cu"].shapes == [5632, 2560]
    assert sum(trials["lars.cu"].shapes) == 23_508_032 + 4_458_624
    pieces = kernel_choice.norm_shapes(*paper(64, "criterion.micro_batch=4096"))
    assert {shape[0] for shape in pieces} == {44, 64}  # 2 x 22 views, and 20 labeled images with them
    # One process has no statistics to join.
    for words, expected in (
        (("meta.compile=true",), False),
        (("model.fused_batchnorm=false",), False),
        (("meta.channels_last=false",), False),
        ((), True),
    ):
        assert ("norm.cu" in kernel_choice.trials(*paper(1, *words))) == expected
    # The head's activations are rows of channels in any memory format.
    shared = ("model.head_batchnorm=true", "meta.channels_last=false")
    assert "norm.cu" in kernel_choice.trials(*paper(64, *shared))
    assert "norm.cu" not in kernel_choice.trials(*paper(64, shared[1]))
    adamw = kernel_choice.trials(*paper(1, "optimization.optimizer=adamw", "data.backend=torchvision"))
    assert set(adamw) == {"contrast.cu", "norm.cu"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trial_of_a_resnet50_passes_right_arithmetic_and_no_mistake(monkeypatch, precision):
    """On every shape of the run's network, at 64 pixels."""
    config, sizes = paper(1, "data.augmentation.size=64", f"meta.precision={precision}")
    trial = kernel_choice.trials(
        config, replace(sizes, local_unlabeled=3, classes_per_batch=2, supervised_steps=0)
    )
    prove, sums = trial["norm.cu"].prove, norm_kernel._sums
    with on_the_host(norm_kernel):
        monkeypatch.setattr(norm_kernel, "fused_norm", emulated())
        prove(HERE)
        for fault in FAULTS:
            monkeypatch.setattr(norm_kernel, "fused_norm", emulated(fault))
            with pytest.raises(
                KernelError, match=r"BatchNorm of .* differs from its twin by one rounding and"
            ):
                prove(HERE)
        # The sums of one rank are not added.
        monkeypatch.setattr(norm_kernel, "fused_norm", emulated())
        monkeypatch.setattr(norm_kernel, "_sums", lambda module, moments: sums(module, moments[:-1]))
        with pytest.raises(KernelError, match="statistics over ranks"):
            prove(HERE)


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ((1.0, 2.0), None),
        ((1.02, 1.0), None),  # noise
        ((2.0, 1.0), "slower than PyTorch's operators: 2 ms against 1 ms"),
        (None, "differs"),
        (torch.OutOfMemoryError(), "the device has too little memory for the trial of x.cu"),
    ],
)
def test_kernel_is_used_if_it_is_right_and_not_slower(monkeypatch, times, reason):
    def prove(device):
        if times is None:
            raise KernelError("differs")

    def measured(*_):
        if isinstance(times, Exception):
            raise times
        return times

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(self_test, "milliseconds", measured)
    verdict = kernel_choice.try_kernel("x.cu", kernel_choice.Trial([], prove, lambda device: print), HERE)
    assert verdict.reason == reason and verdict.final == (not isinstance(times, Exception))


def test_timing_takes_turns_with_the_kernels_and_without(monkeypatch):
    seconds = {None: iter([9, *[1, 2] * 4]), "timed without them": iter([9, *[4, 3] * 4])}
    monkeypatch.setattr(self_test, "_seconds", lambda work, device: next(seconds[work()]))
    now = lambda: self_test._reasons["x.cu", HERE]  # noqa: E731
    assert self_test.milliseconds("x.cu", HERE, lambda device: now) == (1000, 4000)
    assert now() is None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["lars.cu", "contrast.cu", "norm.cu"])
def test_what_is_timed_runs_by_the_twin_on_a_cpu(source):
    """On a CPU no kernel takes the tensors, so the work is the twin's."""
    config, sizes = paper(64, "model.name=resnet_tiny", "data.augmentation.size=32", "meta.precision=fp32")
    kernel_choice.trials(config, replace(sizes, local_unlabeled=2, classes_per_batch=2))[source].work(HERE)()


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
    now = {"contrast.cu": None, "norm.cu": "no NVRTC"}
    before = {"lars.cu": False, "norm.cu": True, "contrast.cu": True}
    paths, lost = kernel_choice.obey(now, before, CARD)
    assert lost == ["norm.cu"] and paths["contrast.cu"] is None
    assert paths["lars.cu"] == self_test._reasons["lars.cu", CARD] == kernel_choice.STAYS_OFF


def test_resolved_auto_is_what_the_paths_allow():
    paths = {"norm.cu": None, kernel_choice.GRAPH: "slower"}

    def fused(*words, found=paths):
        return kernel_choice.resolved(paper(1, *words)[0], found).model.fused_batchnorm

    assert fused() is True and fused(found={}) is False and fused(found={"norm.cu": "slower"}) is False
    assert fused("model.fused_batchnorm=false") is False and fused("meta.compile=true") is False
    # The kernels then compute the head's statistics over ranks.
    assert fused("meta.channels_last=false") is False and fused("model.name=timm/resnet18") is False
    assert fused("model.fused_batchnorm=true", found={"norm.cu": "slower"}) is True
    config = kernel_choice.resolved(paper(1)[0], paths)
    assert (config.meta.cuda_graph, config.data.view_operator) == (False, "auto")


def test_why_not_reports_failed_proofs(monkeypatch):
    def proof(error):
        def prove(device):
            raise error

        return prove

    assert self_test.why_not("x.cu", HERE, proof(KernelError("differs"))) == "differs"
    monkeypatch.setenv("FASTSUNCET_KERNELS", "off")
    assert self_test.why_not("x.cu", HERE, proof(AssertionError())) == "FASTSUNCET_KERNELS is off: unset it"


def test_describe_names_what_runs_and_why_not():
    config, _ = paper(1, "model.fused_batchnorm=true")
    paths = {"lars.cu": None, "contrast.cu": None, "norm.cu": "rank 1: no NVRTC"}
    text = (
        "lars.cu, contrast.cu; not norm.cu: rank 1: no NVRTC; not torch.compile: `fastsuncet tune` tries it"
    )
    assert kernel_choice.describe(config, paths) == text
    assert "model.fused_batchnorm has no effect" in kernel_choice.describe(config, {})
    assert "PyTorch's operators; not x: y" in kernel_choice.describe(config, {"x": "y"})
    for words, note in (
        ("meta.autotune=null", "; Inductor does not time its reductions (meta.autotune)"),
        ("meta.autotune=true", ""),
    ):
        found = kernel_choice.describe(paper(1, "meta.compile=true", words)[0], paths)
        assert found == f"lars.cu, contrast.cu, torch.compile; not norm.cu: rank 1: no NVRTC{note}"


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
