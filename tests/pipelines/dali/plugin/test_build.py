"""How the color operator is compiled and kept, and what the command says where it cannot be."""

import os
from pathlib import Path

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from pipelines.dali.plugin import build, use
from pipelines.dali.plugin.__main__ import main
from pipelines.data_errors import DataError
from tests.support.plugin import MISSING, needs_plugin, tiny_compiler


def kept_by_default() -> Path:
    return build.build(lambda _: None)


def message_of_command(capsys) -> str:
    assert main([]) == 1
    message = capsys.readouterr().err
    assert "DALI's own operators are used instead" in message
    return message


def test_build_keeps_a_library_in_a_private_folder_and_compiles_once(tiny, monkeypatch):
    proved = []
    assert build.kept() is None
    path = build.build(proved.append)
    assert build.kept() == path == build.build(proved.append) and len(proved) == 1
    assert list(tiny.iterdir()) == [path] and tiny.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.kept() == path  # using it needs no compiler


def test_build_keeps_nothing_that_fails_its_proof(tiny):
    def refuse(path):
        assert path.exists()
        raise DataError("another pixel")

    with pytest.raises(DataError, match="another pixel"):
        build.build(refuse)
    assert build.kept() is None and list(tiny.iterdir()) == []


def test_build_does_not_count_half_a_library(tiny):
    path = kept_by_default()
    path.write_bytes(path.read_bytes()[:-1])
    assert build.kept() is None
    assert kept_by_default() == path == build.kept()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo it is a nuisance >&2; exit 1", r"does not compile with .*cc:\nit is a nuisance"),
        (":", r"does not compile with .*cc:\nit wrote no library"),
    ],
)
def test_build_shows_a_compilers_complaint(tiny, monkeypatch, tmp_path, body, message):
    monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path, body)))
    with pytest.raises(DataError, match=message):
        kept_by_default()
    assert list(tiny.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o720])
def test_build_uses_no_library_from_a_folder_that_others_can_write_to(tiny, mode):
    path = kept_by_default()
    tiny.chmod(mode)
    assert build.kept() is None
    with pytest.raises(DataError, match=f"other users can write to {tiny}"):
        use.choose("plugin", "cpu")
    tiny.chmod(0o755)  # readable by all is no danger
    assert build.kept() == path


def test_build_uses_no_library_from_another_users_folder(tiny, monkeypatch):
    path = kept_by_default()
    if os.geteuid() == 0:  # root's own folders are trusted for everyone
        os.chown(tiny, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert build.kept() is None and path.exists()


@pytest.mark.parametrize(
    "what", ["sources", "flags", "options in $CXX", "DALI", "DALI's flags", "DALI's CUDA", "processor"]
)
def test_library_path_depends_on_everything_that_decides_the_code(tiny, monkeypatch, tmp_path, what):
    from nvidia.dali import sysconfig

    before = build.library_path()
    if what == "sources":
        for path in build.sources():
            (tmp_path / path.name).write_text(path.read_text() + "\n")
        monkeypatch.setattr(build, "SOURCES", tmp_path)
    elif what == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    elif what == "options in $CXX":
        monkeypatch.setenv("CXX", f"{os.environ['CXX']} -march=native")
    elif what == "DALI":
        monkeypatch.setattr("nvidia.dali.__version__", "2.99.0")
    elif what == "DALI's flags":
        monkeypatch.setattr(sysconfig, "get_compile_flags", lambda: ["-I/elsewhere", "-DANOTHER"])
    elif what == "DALI's CUDA":
        monkeypatch.setattr("nvidia.dali.__cuda_version__", "11080")
    else:
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert build.library_path() != before and build.library_path().parent == before.parent


@pytest.mark.parametrize("cxx", ["no-such-compiler", "g++ '"])
def test_unavailable_names_a_compiler_that_is_missing(monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    assert build.unavailable() == f"no C++ compiler: $CXX ({cxx}) was not found"


def test_unavailable_names_headers_that_are_missing(monkeypatch):
    real = build.header_folder
    if MISSING is not None:
        pytest.skip(f"the plug-in cannot be built: {MISSING}")
    monkeypatch.setattr(build, "header_folder", lambda name: None if name.startswith("dali") else real(name))
    assert build.unavailable().startswith("DALI's header dali/core/geom/mat.h was not found")
    monkeypatch.setattr(build, "header_folder", lambda name: None)
    assert build.unavailable().startswith("CUDA's headers crt/host_config.h and nv/target were not found")


def test_unavailable_names_a_user_without_a_home(tiny, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FASTSUNCET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert not use.choose("auto", "cpu")
    with pytest.raises(DataError, match=r"no cache folder \(Could not .*set FASTSUNCET_CACHE"):
        use.choose("plugin", "cpu")


# -- the command


@needs_plugin
def test_command_builds_once(plugin, capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == f"The color operator was built before: {plugin}\n"


def test_command_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "cannot be built here: no C++ compiler" in message_of_command(capsys)


@pytest.mark.parametrize("place", ["file/cache", "/proc/nowhere"])
def test_command_names_a_cache_that_cannot_be_written(tiny, monkeypatch, tmp_path, capsys, place):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / place))  # an absolute one stands for itself
    message = message_of_command(capsys)
    assert f"cannot be kept in {tmp_path / place}" in message and "set FASTSUNCET_CACHE" in message
    assert not use.choose("auto", "cpu")


def test_command_keeps_no_library_that_dali_cannot_load(tiny, monkeypatch, capsys):
    monkeypatch.setattr(use, "_loaded", {})
    assert "DALI cannot run it: Failed to load library" in message_of_command(capsys)
    assert list(tiny.iterdir()) == []
