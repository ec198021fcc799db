"""The doctor finds what is missing, says what to do, and ends its page whatever it meets."""

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


def test_this_machine_can_run_and_dali_decodes_here():
    pytest.importorskip("nvidia.dali")
    code, text = examined(*page.EXAMINATIONS)
    assert code == 0
    assert re.search(r"^python +ok +3\.1\d", text, re.M)
    assert re.search(r"^DALI +ok +2\.\d+.*decoded an image on the CPU", text, re.M)
    assert text.endswith(
        "`fastsuncet train` can run here. What is absent is not needed, or something stands in for it."
    )
    assert len(text.splitlines()) < 40  # one page


def test_what_is_absent_is_no_problem_and_what_is_a_problem_ends_with_1():
    absent = ("apex", lambda: Finding("absent", "not needed"))
    problem = ("disk", lambda: Finding("problem", "full", "free some"))
    assert examined(absent)[0] == 0
    assert examined(absent, problem) == (
        1,
        "apex         absent   not needed\n"
        "disk         problem  full\n"
        "                      -> free some\n"
        "\n"
        "disk: see the advice above; a run would stop or fail there.",
    )


def test_an_examination_that_breaks_is_a_finding_and_the_page_goes_on():
    def breaks():
        raise OSError("libcufft.so.11: cannot open\nshared object file")

    code, text = examined(("DALI", breaks), ("cores", lambda: Finding("ok", "2")))
    assert code == 1
    assert text.startswith("DALI         problem  OSError: libcufft.so.11: cannot open shared object file\n")
    assert "\ncores        ok       2\n" in text


@pytest.mark.parametrize(
    ("version", "inside"),
    [("2.11.0", True), ("2.15.1+cu130", True), ("2.10.9", False), ("2.16.0", False), ("3.0", False)],
)
def test_a_version_is_held_against_the_bounds_of_the_project(version, inside, monkeypatch):
    monkeypatch.setattr(page, "installed", lambda name: version)
    monkeypatch.setattr(page, "requires", lambda name: ["torchvision>=0.26,<0.30", "torch>=2.11,<2.16"])
    finding = page.required("torch")()
    assert finding.state == ("ok" if inside else "problem")
    if not inside:
        assert finding.advice == "pip install 'torch>=2.11,<2.16'"


def test_a_missing_package_comes_with_its_command(monkeypatch):
    monkeypatch.setattr(page, "requires", lambda name: ["timm>=1.0.20,<2"])
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it now fails
    finding = page.required("timm")()
    assert finding.state == "problem"
    assert finding.advice == "pip install 'timm>=1.0.20,<2'"


@pytest.fixture
def fake_apex(tmp_path, monkeypatch):
    """Makes a package named apex with the given files, and forgets it afterwards."""

    def make(**files: str):
        folder = tmp_path / "apex"
        folder.mkdir()
        for name, text in {"__init__": "", **files}.items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.mark.skipif("apex" in sys.modules, reason="a real apex is loaded")
def test_nvidias_apex_is_told_from_the_package_that_pip_install_apex_brings(fake_apex):
    fake_apex(velruse="")
    assert page.apex() == Finding(
        "absent", "the package named apex here is another one, a web toolkit", "pip uninstall apex"
    )


@pytest.mark.skipif("apex" in sys.modules, reason="a real apex is loaded")
def test_nvidias_apex_is_known_by_its_optimizers_without_loading_them(fake_apex):
    fake_apex(optimizers="raise RuntimeError('loaded')")
    assert page.apex() == Finding("ok", "NVIDIA's")


@pytest.mark.skipif("apex" in sys.modules, reason="a real apex is loaded")
def test_an_apex_that_fails_to_import_is_left_alone(fake_apex):
    fake_apex(__init__="raise ImportError('no amp_C')")
    assert page.apex() == Finding("absent", "installed but not importable (no amp_C)", "it is not used")


@pytest.mark.parametrize(("free", "state"), [(0.5e9, "problem"), (5e9, "ok")])
def test_a_disk_without_room_for_checkpoints_is_a_problem(free, state, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free))
    assert page.disk().state == state
    assert f"{free / 1e9:.1f} GB free in {Path.cwd()}" in page.disk().facts


def test_little_shared_memory_is_a_problem_only_for_several_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1, total=64e6))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert page.shared_memory().state == "ok"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert page.shared_memory() == Finding("problem", "64 MB", "docker run --shm-size=1g")


def test_a_package_of_unknown_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(page, "installed", lambda name: None)
    assert page.required("timm")().facts == "importable, but of unknown version"


def test_extras_that_are_not_installed_come_with_one_command(monkeypatch):
    monkeypatch.setattr(page, "installed", {"scikit-learn": "1.9"}.get)
    assert page.extras() == Finding(
        "absent",
        "tensorboard, wandb, nvidia-ml-py (installed: scikit-learn 1.9)",
        "pip install 'fastsuncet[tensorboard,wandb,energy]' for what uses them",
    )


def test_without_dali_the_page_says_what_stands_in_and_how_to_get_it(monkeypatch):
    from pipelines import backend

    monkeypatch.setattr(backend, "dali_problem", lambda: "No module named 'nvidia.dali'")
    finding = page.dali()
    assert finding.state == "absent"
    assert re.match(
        r"pip install 'nvidia-dali-cuda1[23]0>=2\.2,<3'; until then torchvision reads", finding.advice
    )
