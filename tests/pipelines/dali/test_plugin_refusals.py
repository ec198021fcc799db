"""Where our colour operator cannot be built, kept or trusted, a run goes without it and the command says why."""

import os
from pathlib import Path

import numpy as np
import pytest

from pipelines import backend
from pipelines.dali.plugin import build, use
from pipelines.dali.plugin.__main__ import main
from pipelines.data_errors import DataError
from pipelines.loader import open_loader
from tests.pipelines.dali.test_plugin import needs_dali, needs_plugin, tiny, tiny_compiler  # noqa: F401 -- a fixture
from tests.pipelines.test_loader import unlabeled
from tests.support.pictures import write_pictures

LOST = "Nothing is lost but time"


def refused(capsys) -> str:
    """What the command says when it fails, in words and not by a traceback."""
    assert main([]) == 1
    told = capsys.readouterr().err
    assert LOST in told
    return told


@pytest.mark.parametrize("place", ["file/cache", "/proc/nowhere"])
def test_a_cache_that_cannot_be_written_is_said_by_its_name(tiny, monkeypatch, tmp_path, capsys, place):  # noqa: F811
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / place))  # an absolute one stands for itself
    told = refused(capsys)
    assert f"cannot be kept in {tmp_path / place}" in told and "set FASTSUNCET_CACHE" in told
    assert not use.choose("auto", "cpu")


def test_a_library_that_dali_cannot_load_is_said_and_not_kept(tiny, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(use, "_loaded", {})
    assert "DALI cannot run it: Failed to load library" in refused(capsys)
    assert list(tiny.iterdir()) == []


def test_a_compiler_that_writes_nothing_and_is_content_is_said(tiny, monkeypatch, tmp_path, capsys):  # noqa: F811
    monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path, ":")))
    assert "does not compile with tiny 1.0:\nit wrote nothing" in refused(capsys)


@needs_dali
def test_a_compiler_that_never_answers_holds_no_run_up(monkeypatch, tmp_path):
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nsleep 5\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr(build, "ANSWER", 0.1)
    assert build.unavailable() == f"{hanging} does not tell its version"


@needs_dali
def test_half_a_quotation_in_cxx_ends_no_run(monkeypatch):
    monkeypatch.setenv("CXX", "g++ '")
    assert not use.choose("auto", "cpu") and "no C++ compiler: $CXX (g++ ')" in build.unavailable()


def test_a_user_without_a_home_goes_without_it(tiny, monkeypatch):  # noqa: F811
    monkeypatch.delenv("FASTSUNCET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert not use.choose("auto", "cpu")
    with pytest.raises(DataError, match=r"no folder to keep it in \(Could not .*set FASTSUNCET_CACHE"):
        use.choose("plugin", "cpu")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o720])
def test_no_code_is_run_out_of_a_folder_that_others_may_write_to(tiny, mode):  # noqa: F811
    path = build.build(lambda _: None)
    tiny.chmod(mode)
    assert build.kept() is None
    with pytest.raises(DataError, match=f"others than you may write to {tiny}"):
        use.choose("plugin", "cpu")
    tiny.chmod(0o755)  # to be read by all is no danger
    assert build.kept() == path


def test_no_code_is_run_out_of_another_users_folder(tiny, monkeypatch):  # noqa: F811
    path = build.build(lambda _: None)
    if os.geteuid() == 0:  # whose own folders everyone may trust
        os.chown(tiny, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert build.kept() is None and path.exists()


@pytest.mark.parametrize("what", ["options in $CXX", "DALI's flags", "DALI's CUDA"])
def test_flags_that_are_not_ours_decide_where_a_library_is_kept(tiny, monkeypatch, what):  # noqa: F811
    from nvidia.dali import sysconfig

    monkeypatch.setattr(build, "compiler_version", lambda: "tiny 1.0")
    before = build.place()
    if what == "options in $CXX":
        monkeypatch.setenv("CXX", f"{os.environ['CXX']} -march=native")
    elif what == "DALI's flags":
        monkeypatch.setattr(sysconfig, "get_compile_flags", lambda: ["-I/elsewhere", "-DANOTHER"])
    else:
        monkeypatch.setattr("nvidia.dali.__cuda_version__", "11080")
    assert build.place() != before


@needs_plugin
def test_a_second_library_is_not_proved_by_the_first_one_s_pixels(monkeypatch, tmp_path):
    monkeypatch.setattr(use, "_loaded", {"cpu": "color_jitter-of-before.so"})
    with pytest.raises(RuntimeError, match=r"has loaded color_jitter-of-before\.so already, not another\.so"):
        use.load(tmp_path / "another.so")


def test_one_that_was_asked_for_is_not_silently_missing_where_torchvision_reads(tmp_path, monkeypatch):
    plan = unlabeled(write_pictures(tmp_path, count=6, side=24))
    monkeypatch.setattr(backend, "dali_problem", lambda: "it is not here")
    with pytest.raises(DataError, match="plugin was asked for, and torchvision reads the images"):
        open_loader(plan.index, plan, plan.augmentations, color_operator="plugin")
    open_loader(plan.index, plan, plan.augmentations)


@needs_dali
def test_the_proof_looks_where_sums_quotients_and_halves_would_show_another_rounding(monkeypatch):
    from pipelines.dali.plugin import check_equal as prove

    def halves(greys):  # as DALI adds them up
        if len(greys) <= 65_536:
            return np.float32(greys.sum())
        middle = len(greys) // 2
        return halves(greys[:middle]) + halves(greys[middle:])

    images, numbers = prove.edges()
    greys = [(image.reshape(-1, 3) @ np.array([9798, 19235, 3735]) + 16384) >> 15 for image in images[:-1]]
    sums = [halves(each) for each in greys]
    assert any(total != np.float32(each.sum()) for total, each in zip(sums, greys))
    counts = [np.float32(len(each)) for each in greys]
    assert any(total * np.float32(1 / n) != total / n for total, n in zip(sums, counts))
    product = numbers["brightness"][-1] * np.float32(1)
    assert (images[-1] == 1).any() and product < 0.5 and product + np.float32(0.5) == 1

    seen = []
    monkeypatch.setattr(prove, "load", lambda *_: None)
    monkeypatch.setattr(prove, "both", lambda images, *_, **__: (seen.append(len(images)), ([], []))[1])
    prove.prove(Path("any.so"))
    assert seen == [24, len(images)]
