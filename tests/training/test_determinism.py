"""Precision, and the switches of torch for a run on a GPU. They are the process's; no GPU is needed."""

import pytest
import torch
from torch._inductor import config as inductor

from fastsuncet.commands.api import in_a_callers_process, kept_switches
from fastsuncet.config import load_config
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError
from fastsuncet.training import determinism
from fastsuncet.training.determinism import resolve_precision, set_determinism
from tests.support.runs import CONFIGS, tiny_config, train

CARD = Place(0, 1, torch.device("cuda", 0))
AUTO = "meta.precision=auto"
CUDNN, CUDA = torch.backends.cudnn, torch.backends.cuda
MATMUL = CUDA.matmul

UNTIMED = ("write_are_deterministic_algorithms_enabled", "deterministic")


@pytest.fixture(autouse=True)
def restored_switches(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    with kept_switches():
        yield


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("autotune", [None, True, False])
def test_set_determinism_takes_exact_kernels_and_the_search_among_them_apart(exact, autotune):
    """And never TF32, nor the fused kernels of attention, nor a pass that fills new tensors with NaN."""
    words = [f"meta.deterministic={exact}", "meta.compile=true"]
    words += [] if autotune is None else [f"meta.autotune={autotune}"]
    searches = not exact if autotune is None else autotune
    set_determinism(load_config(CONFIGS / "digits_demo.yaml", words), CARD)
    assert CUDNN.deterministic == torch.are_deterministic_algorithms_enabled() == exact
    assert CUDNN.benchmark == searches
    assert all(getattr(inductor, name) != searches for name in UNTIMED)
    assert not CUDNN.allow_tf32 and not MATMUL.allow_tf32
    fused = (CUDA.flash_sdp_enabled(), CUDA.mem_efficient_sdp_enabled(), CUDA.cudnn_sdp_enabled())
    assert set(fused) == {not exact} and CUDA.math_sdp_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("owner", [torch.backends, CUDNN, MATMUL])
def test_set_determinism_turns_tf32_off_by_whichever_switch_it_is_on(owner):
    owner.fp32_precision = "tf32"
    set_determinism(load_config(CONFIGS / "digits_demo.yaml"), CARD)
    assert not CUDNN.allow_tf32 and not MATMUL.allow_tf32  # torch raises where its two switches disagree
    assert CUDNN.conv.fp32_precision == MATMUL.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("name", "on"), [("allow_tf32", True), ("fp32_precision", "tf32")])
def test_in_a_callers_process_gives_the_caller_its_torch_back(name, on):
    """Where TF32 was set by its newer name, the older one cannot be read."""

    def state():
        names = ((CUDNN, "benchmark"), (CUDNN, "deterministic"), (CUDNN, "allow_tf32"), (MATMUL, name))
        fused = CUDA.flash_sdp_enabled(), CUDA.mem_efficient_sdp_enabled(), CUDA.cudnn_sdp_enabled()
        found = torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device(), *fused
        return *found, *(getattr(owner, each) for owner, each in names), torch.is_grad_enabled()

    setattr(MATMUL, name, on)
    CUDNN.benchmark = True
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
        before = state()
        with in_a_callers_process():
            set_determinism(load_config(CONFIGS / "digits_demo.yaml", ["meta.threads=3"]), CARD)
            made = torch.nn.Linear(2, 2)(torch.ones(1, 2))
            made.sum().backward()
            assert made.dtype == torch.float32 and made.device.type == "cpu" and state() != before
        assert state() == before and torch.empty(1).device.type == "meta"


def pretend(monkeypatch, *, cpu=False, card=(8, 0)):
    """Let this CPU have bfloat16, or not, and a GPU a compute capability."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)


@pytest.mark.parametrize(
    ("device", "has", "precision", "why"),
    [
        ("cuda", {"card": (8, 0)}, "bf16", "this GPU computes bfloat16"),
        ("cuda", {"card": (7, 5)}, "fp16", "this GPU, of compute capability 7.5, has no bfloat16"),
        ("cpu", {"cpu": True}, "bf16", "this CPU computes bfloat16"),
        ("cpu", {"cpu": False}, "fp32", "this CPU has neither AVX512_BF16 nor AMX"),
    ],
)
def test_precision_auto_is_what_the_hardware_computes(monkeypatch, device, has, precision, why):
    pretend(monkeypatch, **has)
    config = load_config(CONFIGS / "digits_demo.yaml", [AUTO])
    resolved, note = resolve_precision(config, torch.device(device))
    assert (resolved.meta.precision, note) == (precision, f" (auto: {why})")
    slow = "" if precision == "bf16" else f" (slow: {why}; meta.precision=auto takes {precision})"
    for other, said in (("fp16", ""), ("fp32", ""), ("bf16", slow)):
        written = load_config(CONFIGS / "digits_demo.yaml", [f"meta.precision={other}"])
        assert resolve_precision(written, torch.device(device)) == (written, said)


def test_precision_auto_is_one_that_all_ranks_compute(monkeypatch):
    pretend(monkeypatch)
    monkeypatch.setattr(determinism, "gather_json", lambda own: [own, ["fp16", "another GPU"]])
    config = load_config(CONFIGS / "digits_demo.yaml", [AUTO])
    assert resolve_precision(config, CARD.device)[0].meta.precision == "fp16"


@pytest.mark.slow
def test_precision_that_was_chosen_is_kept_and_refused_on_other_hardware(tmp_path, monkeypatch, capfd):
    """test_train.py has what says it: config.yaml and the first metrics line."""
    config = tiny_config(tmp_path, AUTO, "optimization.steps=2", "optimization.warmup=0")
    pretend(monkeypatch, cpu=False)
    train(config)
    assert "fp32 (auto: this CPU has neither AVX512_BF16 nor AMX)" in capfd.readouterr().out
    assert load_config(config.run_folder / "config.yaml").meta.precision == "fp32"
    pretend(monkeypatch, cpu=True)
    with pytest.raises(CheckpointError, match=r"precision: fp32 in the checkpoint, bf16 now \(auto"):
        train(config)
    train(tiny_config(tmp_path, "meta.precision=fp32", "optimization.steps=2", "optimization.warmup=0"))
