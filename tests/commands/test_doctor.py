"""The doctor finds what is missing, says what to do, and finishes its page in every case."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsuncet.commands import doctor as page
from fastsuncet.commands.doctor import Finding, doctor


def examined(*examinations) -> tuple[int, str]:
    lines: list[str] = []
    return doctor(lines.append, list(examinations)), "\n".join(lines)


def test_doctor_finds_that_this_machine_can_run():
    pytest.importorskip("nvidia.dali")
    code, text = examined(*page.EXAMINATIONS)
    assert code == 0
    assert re.search(r"^python +ok +3\.1\d", text, re.M)
    assert re.search(r"^DALI +ok +2\.\d+.*decoded an image on the CPU", text, re.M)
    assert "`fastsuncet train` can run here." in text.splitlines()[-1]
    assert len(text.splitlines()) < 40, "one page"


def test_doctor_ends_with_1_for_a_problem_only():
    absent = ("apex", lambda: Finding("absent", "not needed"))
    problem = ("disk", lambda: Finding("problem", "full", "free some"))
    assert examined(absent)[0] == 0
    assert examined(absent, problem) == (
        1,
        "apex         absent   not needed\n"
        "disk         problem  full\n"
        "                      -> free some\n"
        "\n"
        "disk: follow the advice above; a run would fail there.",
    )


def test_doctor_goes_on_after_an_examination_that_fails():
    def fails():
        raise OSError("libcufft.so.11: cannot open\nshared object file")

    code, text = examined(("DALI", fails), ("cores", lambda: Finding("ok", "2")))
    assert code == 1
    assert text.startswith("DALI         problem  OSError: libcufft.so.11: cannot open shared object file\n")
    assert "\ncores        ok       2\n" in text


@pytest.mark.parametrize(
    ("version", "inside"),
    [("2.11.0", True), ("2.15.1+cu130", True), ("2.10.9", False), ("2.16.0", False), ("3.0", False)],
)
def test_required_compares_versions_with_the_bounds(version, inside, monkeypatch):
    monkeypatch.setattr(page, "installed", lambda name: version)
    monkeypatch.setattr(page, "requires", lambda name: ["torchvision>=0.26,<0.30", "torch>=2.11,<2.16"])
    finding = page.required("torch")()
    assert finding.state == ("ok" if inside else "problem")
    assert finding.advice == ("" if inside else "pip install 'torch>=2.11,<2.16'")


def test_required_names_the_command_for_a_missing_package(monkeypatch):
    monkeypatch.setattr(page, "requires", lambda name: ["timm>=1.0.20,<2"])
    monkeypatch.setattr(page, "installed", lambda name: None)
    assert page.required("timm")().facts == "importable, but of unknown version"
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it now fails
    finding = page.required("timm")()
    assert finding.state == "problem" and finding.facts.startswith("not installed")
    assert finding.advice == "pip install 'timm>=1.0.20,<2'"


@pytest.mark.skipif("apex" in sys.modules, reason="a real apex is loaded")
@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("velruse", "", ("absent", "the package named apex here is another one", "pip uninstall apex")),
        ("optimizers", "raise RuntimeError('loaded')", ("ok", "NVIDIA's", "")),
        (
            "__init__",
            "raise ImportError('no amp_C')",
            ("absent", "installed but not importable (no amp_C)", ""),
        ),
    ],
    ids=["another package", "NVIDIA's, not loaded", "broken"],
)
def test_apex_is_distinguished_from_its_namesake(tmp_path, monkeypatch, name, text, wanted):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "apex" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        found, (state, facts, advice) = page.apex(), wanted
        assert found.state == state and facts in found.facts and advice in found.advice
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == "apex"]:
            del sys.modules[module]


@pytest.mark.parametrize(("free", "state"), [(0.5e9, "problem"), (5e9, "ok")])
def test_disk_without_room_for_checkpoints_is_a_problem(free, state, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free))
    assert page.disk().state == state
    assert f"{free / 1e9:.1f} GB free in {Path.cwd()}" in page.disk().facts


def test_shared_memory_is_a_problem_only_for_several_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1, total=64e6))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert page.shared_memory().state == "ok"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert page.shared_memory() == Finding("problem", "64 MB", "docker run --shm-size=1g")


def test_extras_that_are_missing_come_with_one_command(monkeypatch):
    monkeypatch.setattr(page, "installed", {"scikit-learn": "1.9"}.get)
    facts = "tensorboard, wandb, nvidia-ml-py (installed: scikit-learn 1.9)"
    advice = "if you need them: pip install 'fastsuncet[tensorboard,wandb,energy]'"
    assert page.extras() == Finding("absent", facts, advice)


def test_dali_that_is_missing_comes_with_its_command(monkeypatch):
    from pipelines import backend

    monkeypatch.setattr(backend, "dali_problem", lambda: "No module named 'nvidia.dali'")
    finding = page.dali()
    assert finding.state == "absent"
    assert re.match(r"pip install 'nvidia-dali-cuda1[23]0>=2\.2,<3'; until then torchvision", finding.advice)


def test_nvrtc_that_is_missing_is_absent(monkeypatch):
    import torch

    from pipelines import cuda_compiler

    def fails():
        raise cuda_compiler.KernelError("NVRTC: libnvrtc.so.13 was not found")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_compiler, "version", fails)
    advice = "PyTorch's kernels are used instead"
    assert page.nvrtc() == Finding("absent", "NVRTC: libnvrtc.so.13 was not found", advice)
