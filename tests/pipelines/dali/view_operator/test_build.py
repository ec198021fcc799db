"""How the view operator is compiled and kept, and what the command says where it cannot be."""

import os
import platform
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from pipelines.dali.view_operator import build, use
from pipelines.dali.view_operator.__main__ import main
from pipelines.data_errors import DataError
from tests.support.ranks import run_ranks
from tests.support.view_operator import MISSING, needs_view_operator, tiny_compiler


def kept_by_default(**options) -> Path:
    return build.build(lambda _: None, **options)


def message_of_command(capsys, *arguments) -> str:
    assert main([*arguments]) == 1
    message = capsys.readouterr().err
    assert "DALI's own operators are used instead" in message
    return message


def libraries(folder: Path) -> list[Path]:
    return list(folder.glob("*.so"))


def test_build_keeps_a_library_and_compiles_once(tiny, monkeypatch):
    proved = []
    assert build.kept() is None
    path = build.build(proved.append)
    assert build.kept() == path == build.build(proved.append) and len(proved) == 1
    assert libraries(tiny) == [path] and not list(tiny.glob(".tmp*"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.kept() == path  # using it needs no compiler


def build_on_a_rank(rank: int, world_size: int, cache: str, compiler: str) -> None:
    os.environ.update(FASTSUNCET_CACHE=cache, CXX=compiler)
    kept_by_default()


@pytest.mark.slow
def test_build_of_several_processes_compiles_once(tiny, tmp_path):
    """The ranks of a machine start together: the others wait for the first and use what it built."""
    compiler = tiny_compiler(tmp_path, f'echo x >> {tmp_path}/calls; sleep 1; echo code > "$out"')
    run_ranks(build_on_a_rank, 3, str(tiny.parent), str(compiler))
    assert (tmp_path / "calls").read_text() == "x\n" and len(libraries(tiny)) == 1


def test_build_keeps_no_half_library_and_none_that_fails_its_proof(tiny):
    def refuse(path):
        assert path.exists()
        raise DataError("another pixel")

    with pytest.raises(DataError, match="another pixel"):
        build.build(refuse)
    assert build.kept() is None and libraries(tiny) == []
    path = kept_by_default()
    path.write_bytes(path.read_bytes()[:-1])
    assert build.kept() is None
    assert kept_by_default() == path == build.kept()


def test_build_prebuilt_serves_every_user_of_an_installation(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "package" / "prebuilt")
    path = kept_by_default(prebuilt=True)
    assert path.parent == build.PREBUILT and build.kept() == path and not tiny.exists()
    assert path.parent.stat().st_mode & 0o777 == 0o755 and path.stat().st_mode & 0o777 == 0o644


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
    assert libraries(tiny) == []


@pytest.mark.parametrize("name", ["folder", "file"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o720])
def test_build_uses_no_library_that_others_can_write_to(tiny, mode, name):
    path = kept_by_default()
    unsafe = tiny if name == "folder" else path
    unsafe.chmod(mode)
    assert build.kept() is None
    with pytest.raises(DataError, match=f"other users can write to {unsafe}, and compiled code is executed"):
        use.choose(True, "cpu")
    unsafe.chmod(0o755)  # readable by all is no danger
    assert build.kept() == path


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("pipelines.dali.view_operator.build.FLAGS", (*build.FLAGS, "-g")),
        ("nvidia.dali.__version__", "2.99.0"),
        ("nvidia.dali.__cuda_version__", "11080"),
        ("nvidia.dali.sysconfig.get_compile_flags", lambda: ["-I/elsewhere", "-DANOTHER"]),
        ("platform.machine", lambda: "riscv64"),
        ("sources", None),
        ("options in $CXX", None),
    ],
)
def test_library_name_depends_on_everything_that_decides_the_code(tiny, monkeypatch, tmp_path, what, value):
    before = build.library_name()
    if what == "sources":
        for path in build.sources():
            (tmp_path / path.name).write_text(path.read_text() + "\n")
        monkeypatch.setattr(build, "SOURCES", tmp_path)
    elif what == "options in $CXX":
        monkeypatch.setenv("CXX", f"{os.environ['CXX']} -march=native")
    else:
        monkeypatch.setattr(what, value)
    assert build.library_name() != before


@pytest.mark.parametrize("cxx", ["no-such-compiler", "g++ '"])
def test_unavailable_names_a_compiler_that_is_missing(monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    assert build.unavailable() == f"no C++ compiler: $CXX ({cxx}) was not found"


def test_unavailable_names_headers_that_are_missing(monkeypatch):
    real = build.header_folder
    if MISSING is not None:
        pytest.skip(f"the view operator cannot be built: {MISSING}")
    monkeypatch.setattr(build, "header_folder", lambda name: None if name.startswith("dali") else real(name))
    assert build.unavailable().startswith("DALI's header dali/core/geom/mat.h was not found")
    monkeypatch.setattr(build, "header_folder", lambda name: None)
    assert build.unavailable().startswith("CUDA's headers cuda.h and crt/host_config.h and nv/target were")


def test_unavailable_names_a_user_without_a_home(tiny, monkeypatch):
    monkeypatch.delenv("FASTSUNCET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine it.")))
    assert not use.choose("auto", "cpu")
    with pytest.raises(DataError, match=r"no cache folder \(Could not .*set FASTSUNCET_CACHE"):
        use.choose(True, "cpu")


# -- the command


@needs_view_operator
def test_command_builds_once(view_operator, capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == f"The view operator was built before: {view_operator}\n"


@pytest.mark.parametrize("place", ["file/cache", "/proc/nowhere"])
def test_command_names_a_cache_that_cannot_be_written(tiny, monkeypatch, tmp_path, capsys, place):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / place))  # an absolute one stands for itself
    message = message_of_command(capsys)
    assert f"cannot be kept in {tmp_path / place}" in message and "set FASTSUNCET_CACHE" in message
    assert not use.choose("auto", "cpu")


def test_command_keeps_no_library_that_dali_cannot_load(tiny, monkeypatch, capsys):
    monkeypatch.setattr(use, "_loaded", [])
    assert "DALI cannot run it: Failed to load library" in message_of_command(capsys)
    assert libraries(tiny) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code of x86-64 is read")
def test_blur_keeps_its_sums_in_registers_on_every_processor():
    """Lanes wider than a register pass through memory at each tap, which made the blur 20 times slower on AVX2.

    Also for processors that this machine is not: AVX-512 adds 16 floats an instruction, AVX2 8, SSE 4.
    """
    if not (compiler := build.compiler()):
        pytest.skip("no C++ compiler")
    command = [*compiler, *build.FLAGS, "-S", "-o", "-", "-x", "c++", str(build.SOURCES / "view.h")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # The default has no name of its own in g++'s code.
    functions = re.findall(r"^\w*convolve\w*(?:\.(avx\w+|default))?:\n(.*?)\.cfi_endproc", code, re.M | re.S)
    assert sorted(kind for kind, _ in functions if kind != "default") in (
        ["", "avx2", "avx512f"],
        ["avx2", "avx512f"],
    )
    for kind, body in functions:
        register = {"avx512f": "zmm", "avx2": "ymm"}.get(kind, "xmm")
        assert len(re.findall(rf"\bv?addps\b.*%{register}", body)) >= 4, kind
        assert not re.findall(r"\bv?mov\w+\s+%[xyz]mm\d+, -?\w*\(%r[sb]p\)", body), kind
