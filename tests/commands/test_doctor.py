"""The doctor finds what is missing, says what to do, and finishes its page in every case."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.cli import doctor as page
from fastsuncet.cli.doctor import Finding, doctor
from pipelines import backend, cuda_compiler
from pipelines.dali.view_operator import build


def test_doctor_finds_that_this_machine_can_run(run_cli):
    text = run_cli("doctor")
    assert re.search(r"^python +ok +3\.1\d", text, re.M)
    assert re.search("^onnx ", text, re.M) and not re.search("^dali", text, re.M), "both builds of DALI"
    assert "`fastsuncet train` can run here." in text.splitlines()[-1]
    assert len(text.splitlines()) < 40, "one page"
    pytest.importorskip("nvidia.dali")
    assert re.search(r"^DALI +ok +2\.\d+.*decoded an image on the CPU", text, re.M)


def test_doctor_ends_with_1_for_a_problem_only_and_goes_on_after_a_failure(capsys):
    def fails():
        raise OSError("libcufft.so.11: cannot open\nshared object file")

    absent = ("DALI", lambda: Finding("absent", "not needed"))
    problem = ("disk", lambda: Finding("problem", "full", "free some"))
    assert doctor([absent]) == 0
    capsys.readouterr()
    assert doctor([absent, ("views", fails), problem]) == 1
    assert capsys.readouterr().out == (
        "DALI         absent   not needed\n"
        "views        problem  OSError: libcufft.so.11: cannot open shared object file\n"
        "                      -> install it again\n"
        "disk         problem  full\n"
        "                      -> free some\n"
        "\n"
        "views, disk: follow the advice above; a run would fail there.\n"
    )


def test_cards_are_those_that_torch_has_code_for(monkeypatch):
    """Machine code runs on newer cards of its generation, portable code on all newer ones."""
    card = SimpleNamespace(name="a card", total_memory=8e10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a", "compute_120"])
    for card.major, card.minor in ((7, 5), (8, 9), (9, 0), (13, 0)):
        assert page.cards().state == "ok", card
    for card.major, card.minor in ((7, 0), (10, 3)):
        found = page.cards()
        assert found.state == "problem" and "no code for a card, " in found.facts, card


def test_required_compares_versions_with_the_bounds(monkeypatch):
    monkeypatch.setattr(page, "_about", lambda field: ["torchvision>=0.26,<0.30", "torch>=2.11,<2.16"])
    for version, state, facts in (
        ("2.11.0", "ok", "2.11.0"),
        ("2.15.1+cu130", "ok", "2.15.1+cu130"),
        ("2.10.9", "problem", "2.10.9, tested with torch<2.16,>=2.11"),
        ("3.0", "problem", "3.0, tested with"),
        (None, "problem", "importable, but of unknown version"),
        ("missing", "problem", "not installed"),
    ):
        monkeypatch.setattr(page, "installed", {"torch": version}.get)
        if version == "missing":
            monkeypatch.setitem(sys.modules, "torch", None)  # importing it now fails
        found = page.required("torch")
        assert found.state == state and found.facts.startswith(facts)
        assert found.advice == ("" if state == "ok" else "pip install 'torch<2.16,>=2.11'")


@pytest.mark.parametrize(
    ("look", "size", "gpus", "wanted"),
    [
        (page.disk, 0.5e9, 0, ("problem", "0.5 GB free in FOLDER")),
        (page.disk, 5e9, 0, ("ok", "5.0 GB free in FOLDER")),
        (page.shared_memory, 64e6, 1, ("ok", "0.06 GB")),
        (page.shared_memory, 64e6, 8, ("problem", "0.06 GB", "docker run --shm-size=1g")),
        (page.cores, 0, 2, ("ok", f"{backend.cores()}, {backend.cores() / 2:.0f} a GPU")),
    ],
)
def test_room_is_a_problem_where_a_run_needs_it(look, size, gpus, wanted, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size, total=size))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert look()[: len(wanted)] == tuple(word.replace("FOLDER", str(tmp_path)) for word in wanted)


def test_what_is_missing_comes_with_its_command(monkeypatch):
    def fails():
        raise cuda_compiler.KernelError("NVRTC: libnvrtc.so.13 was not found")

    monkeypatch.setattr(cuda_compiler, "version", fails)
    advice = "needed only on a GPU: PyTorch's kernels are used instead"
    assert page.nvrtc() == Finding("absent", "NVRTC: libnvrtc.so.13 was not found", advice)

    monkeypatch.setattr(build, "kept", lambda: None)
    assert page.view_operator().advice.startswith("fastsuncet build;")
    monkeypatch.setattr(build, "kept", lambda: Path("/cache/view.so"))
    assert page.view_operator() == Finding("ok", "compiled: /cache/view.so")

    monkeypatch.setattr(backend, "dali_problem", lambda: "No module named 'nvidia.dali'")
    finding = page.dali()
    assert finding.state == "absent"
    assert re.match(r"pip install 'nvidia-dali-cuda1[23]0>=2\.2,<3'; until then torchvision", finding.advice)


def test_extra_says_how_to_install_it(monkeypatch):
    lines = ["torch; os_name!='nt'", "onnx>=1.17; extra == 'onnx'", "onnxruntime >=1.20 ; extra == 'onnx'"]
    monkeypatch.setattr(page, "_about", lambda field: [*lines, "fastsuncet[onnx]; extra == 'onnx'"])
    monkeypatch.setattr(page, "installed", {"onnx": "1.18"}.get)
    assert page.extra("onnx") == Finding("absent", "pip install 'onnxruntime>=1.20'")
    monkeypatch.setattr(page, "installed", {"onnx": "1.18", "onnxruntime": "1.21"}.get)
    assert page.extra("onnx") == Finding("ok", "onnx 1.18, onnxruntime 1.21")


def test_fast_paths_are_those_of_the_table_that_a_run_chooses_from(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert page.fast_paths() == Finding("absent", "PyTorch's operators, as on any CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_compiler, "unavailable", lambda: "no NVRTC")
    found = page.fast_paths()
    assert found.state == "ok" and found.facts.endswith("CUDA graph (docs/speed.md)")
    assert found.advice.startswith("not lars.cu: no NVRTC; not ")
