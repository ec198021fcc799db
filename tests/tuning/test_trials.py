"""A kernel is proved and timed on the shapes of the run's own step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.kernels import switches
from fastsuncet.models import norm_kernel
from fastsuncet.models.flops import norm_shapes
from fastsuncet.tuning import trials
from fastsuncet.tuning.fast_paths import APEX, PATHS
from fastsuncet.tuning.trials import Trial, try_kernel
from pipelines.cuda_compiler import KernelError
from tests.support.emulated_norm import FAULTS, emulated
from tests.support.host_kernels import on_the_host
from tests.support.pretended import paper

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_verdicts(monkeypatch):
    monkeypatch.setattr(switches, "_reasons", {})


@pytest.mark.slow
def test_trials_have_the_shapes_of_the_runs_own_step():
    """With labeled images and, once supervision is off, without."""
    norm = trials.norm(*paper(64))
    dtype, modes, shapes = norm.shapes
    assert {(88, 64, 112, 112), (128, 64, 112, 112), (88, 2048, 7, 7)} <= set(shapes)
    assert {shape[0] for shape in shapes} == {88, 128} and len(shapes) == 2 * 12
    assert (dtype, modes) == ("torch.bfloat16", {"fused": True, "shared": True})
    assert norm.prove.keywords == {"shapes": shapes, "dtypes": [torch.bfloat16]}
    assert not trials.norm(*paper(64, "model.sync_batchnorm=false")).shapes[1]["shared"]
    assert trials.contrast_rows(*paper(64)).shapes == [5632, 2560]
    # The proof needs 37 keys.
    assert trials.contrast_rows(*paper(1, "criterion.unsupervised_batch_size=18")).shapes == [2560]
    sizes = trials.lars(*paper(64)).shapes
    assert sum(sizes) == 23_508_032 + 4_458_624 and trials.apex(*paper(64)).shapes == sizes
    pieces = norm_shapes(*paper(64, "criterion.micro_batch=4096"))
    assert {shape[0] for shape in pieces} == {44, 64}  # 2 x 22 views, and 20 labeled images with them


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trial_of_a_resnet50_passes_right_arithmetic_and_no_mistake(monkeypatch, precision):
    """On every shape of the run's network, at 32 pixels."""
    config, sizes = paper(1, "data.augmentation.size=32", f"meta.precision={precision}")
    small = replace(sizes, local_unlabeled=3, classes_per_batch=2, supervised_steps=0)
    prove, sums = trials.norm(config, small).prove, norm_kernel._sums
    with on_the_host(norm_kernel):
        monkeypatch.setattr(norm_kernel, "fused_norm", emulated())
        prove(HERE)
        for fault in FAULTS:
            monkeypatch.setattr(norm_kernel, "fused_norm", emulated(fault))
            with pytest.raises(KernelError, match=r"BatchNorm of .* differs from its twin by one rounding"):
                prove(HERE)
        # The sums of one rank are not added.
        monkeypatch.setattr(norm_kernel, "fused_norm", emulated())
        monkeypatch.setattr(norm_kernel, "_sums", lambda module, moments: sums(module, moments[:-1]))
        with pytest.raises(KernelError, match="statistics over ranks"):
            prove(HERE)


SHORT = "the device has too little memory for the trial of x.cu"


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (([0.002], [0.001]), None),
        (([0.001], [0.00102]), None),  # noise
        (([0.001], [0.002]), "slower than without it: 2 ms against 1 ms"),
        (None, "differs"),
        # Another program can hold the memory: a verdict that is kept would switch the kernel off for good.
        (torch.OutOfMemoryError(), SHORT),
        (KernelError("CUresult 2: CUDA_ERROR_OUT_OF_MEMORY"), SHORT),
        (KernelError("Can't allocate 9 bytes on device 0."), SHORT),
    ],
)
def test_kernel_is_used_if_it_is_right_and_not_slower(monkeypatch, times, reason):
    def prove(device):
        if times is None:
            raise KernelError("differs")
        if isinstance(times, KernelError):
            raise times

    def measured(*_):
        if isinstance(times, Exception):
            raise times
        return times

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(trials, "times_of", measured)
    verdict = try_kernel("x.cu", Trial([], prove, lambda device: print), HERE)
    assert verdict.problem == reason and verdict.final == (not isinstance(times, Exception))


@pytest.mark.parametrize("captures", [False, True])
def test_timing_takes_turns_with_the_kernels_and_without(monkeypatch, captures):
    seconds = {None: iter([9, *[1, 2] * 4]), "timed without them": iter([9, *[4, 3] * 4])}
    monkeypatch.setattr(trials, "seconds", lambda work, times, device: next(seconds[work()]))
    now = lambda: switches._reasons["x.cu", HERE]  # noqa: E731

    def captured(work, device):
        """Replay what was on at the capture, whatever is on later."""
        then = work()
        return SimpleNamespace(replay=lambda: then), None

    if captures:
        monkeypatch.setattr(trials, "capture_on_device", captured)
    base, contender = trials.times_of("x.cu", HERE, lambda device: now)
    assert base == [4, 3, 4, 3, 4, 3, 4] and contender == [1, 2, 1, 2, 1, 2, 1]
    assert now() is None


def test_lack_of_memory_for_a_graph_is_no_reason_to_time_launches(monkeypatch):
    def full(work, device):
        raise RuntimeError("CUDA error: out of memory")  # where CUDA makes the graph, beside torch's memory

    monkeypatch.setattr(trials, "capture_on_device", full)
    with pytest.raises(torch.OutOfMemoryError):
        trials.times_of("x.cu", HERE, lambda device: lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["lars.cu", APEX, "contrast.cu", "norm.cu"])
def test_what_is_timed_runs_by_the_twin_on_a_cpu(source):
    """On a CPU no kernel takes the tensors, so the work is the twin's."""
    # Fewer keys than a chunk has anchors, as on one GPU.
    small = ["criterion.unsupervised_batch_size=20", "criterion.supervised_imgs_per_class=2"]
    tiny = ["model.name=resnet_tiny", "data.augmentation.size=32", "meta.precision=fp32"]
    PATHS[source].trial(*paper(1, *small, *tiny)).work(HERE)()
    # apex is timed without lars.cu
    assert bool(switches._reasons.get(("lars.cu", HERE))) == (source == APEX)
