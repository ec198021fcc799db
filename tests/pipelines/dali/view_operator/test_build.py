"""How the view operator is compiled and kept, when a loader uses it, and what is said where it cannot be used."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from pipelines.dali.view_operator import build, use
from pipelines.dali.view_operator.__main__ import main
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation, Center
from tests.support.ranks import run_ranks
from tests.support.streams import opened, unlabeled


def tiny_compiler(folder: Path, body: str = 'echo code > "$out"') -> Path:
    """Write a compiler that runs `body`, where $out is the file to write."""
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{body}\n')
    path.chmod(0o755)
    return path


VIEWS = [Augmentation(), Center()]


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> Path:
    """The folder of an own cache, for libraries that a tiny compiler writes and nothing proves."""
    missing = build.unavailable()
    if missing is not None and "compiler" not in missing:
        pytest.skip(f"the view operator cannot be built: {missing}")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path)))
    monkeypatch.setattr(use, "prove", lambda _: None)
    return tmp_path / "cache" / "view_operator"


def libraries(folder: Path) -> list[Path]:
    return list(folder.glob("*.so"))


def test_build_keeps_a_library_and_compiles_once(tiny, monkeypatch):
    proved = []
    monkeypatch.setattr(use, "prove", proved.append)
    assert build.kept() is None
    path = use.built()
    assert build.kept() == path == use.built() and len(proved) == 1
    assert libraries(tiny) == [path] and not list(tiny.glob(".tmp*"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.kept() == path  # using it needs no compiler


def build_on_a_rank(rank: int, world_size: int, cache: str, compiler: str) -> None:
    os.environ.update(FASTSUNCET_CACHE=cache, CXX=compiler)
    with mock.patch.object(use, "prove"):
        use.built()


@pytest.mark.slow
def test_build_of_several_processes_compiles_once(tiny, tmp_path):
    """The ranks of a machine start together: the others wait for the first and use what it built."""
    compiler = tiny_compiler(tmp_path, f'echo x >> {tmp_path}/calls; sleep 1; echo code > "$out"')
    run_ranks(build_on_a_rank, 3, str(tiny.parent), str(compiler))
    assert (tmp_path / "calls").read_text() == "x\n" and len(libraries(tiny)) == 1


def test_build_keeps_no_half_library_and_none_that_fails_its_proof(tiny, monkeypatch):
    def refuse(path):
        assert path.exists()
        raise DataError("another pixel")

    monkeypatch.setattr(use, "prove", refuse)
    with pytest.raises(DataError, match="another pixel"):
        use.built()
    assert build.kept() is None and libraries(tiny) == []
    monkeypatch.setattr(use, "prove", lambda _: None)
    path = use.built()
    path.write_bytes(path.read_bytes()[:-1])
    assert build.kept() is None
    assert use.built() == path == build.kept()


def test_build_prebuilt_serves_every_user_of_an_installation(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "package" / "prebuilt")
    own = use.built()  # in the cache folder, which serves one user
    assert main(["--prebuilt"]) == 0
    path = build.kept()
    assert path.parent == build.PREBUILT and own.parent != path.parent
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["--prebuilt"]) == 0 and f"was built before: {path}\n" in capsys.readouterr().out
    assert path.parent.stat().st_mode & 0o777 == 0o755 and path.stat().st_mode & 0o777 == 0o644
    own.parent.chmod(0o777)  # nothing is executed from there
    assert build.kept() == path
    no_home(monkeypatch, tmp_path)
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


PROVE = use.prove


def no_home(monkeypatch, tmp_path):
    monkeypatch.delenv("FASTSUNCET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine it.")))


def broken_library(monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(use, "kept", lambda **_: tmp_path / "broken.so")


def compiler(body: str):
    return lambda monkeypatch, tmp_path: monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path, body)))


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")


def file_for_a_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "file" / "cache"))


def open_to_others(monkeypatch, tmp_path):
    use.built().chmod(0o720)  # see tests/pipelines/test_code_cache.py


def no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "header_folder", lambda name: None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_compiler, r"here: no C\+\+ compiler: \$CXX \(no-such-c"),
        (no_headers, "CUDA's headers cuda.h and crt/host_config.h and nv/target were not found"),
        (open_to_others, "other users can write to .*so, and compiled code is executed"),
        (compiler("echo a nuisance >&2; exit 1"), r"does not compile with .*cc:\na nuisance"),
        (compiler(":"), r"does not compile with .*cc:\nit wrote no library"),
        (compiler('echo code > "$out"'), "DALI cannot run it: Failed to load library"),
        (broken_library, "Failed to load library"),
        (no_home, r"no cache folder \(Could not determine it.*; set FASTSUNCET_CACHE"),
        (file_for_a_folder, "cannot be kept in .*/file/cache.*; set FASTSUNCET_CACHE"),
    ],
)
def test_choose_auto_falls_back_and_true_raises_where_it_cannot_be_used(
    tiny, monkeypatch, tmp_path, capsys, spoil, said
):
    spoil(monkeypatch, tmp_path)
    monkeypatch.setattr(use, "prove", PROVE)
    monkeypatch.setattr(use, "_loaded", [])
    use.say_once.cache_clear()
    assert not use.choose("auto", "cpu", VIEWS)
    shown = capsys.readouterr().out
    assert shown.count("Falling back to DALI's own operators (same pixels, slower): ") == 1
    assert re.search(said, shown) and len(libraries(tiny)) == (spoil is open_to_others)
    with pytest.raises(DataError, match=f"view_operator: true: (.|\n)*{said}"):
        use.choose(True, "cpu", VIEWS)
    if spoil is not broken_library:
        assert main([]) == 1
        message = capsys.readouterr().err
        assert re.search(said, message) and "Runs go without it, slower." in message


@pytest.mark.parametrize("setting", ["auto", True])
def test_choose_builds_what_is_not_built(tiny, monkeypatch, capsys, setting):
    calls = []
    monkeypatch.setattr(use, "load", calls.append)
    assert use.choose(setting, "cpu", VIEWS) and calls == [build.kept()]
    assert "Building the view operator, once for this machine" in capsys.readouterr().out
    for other in (False, "cpu", VIEWS), ("auto", "gpu", VIEWS), (setting, "cpu", [Center()]):
        assert not use.choose(*other) and len(calls) == 1


@dataclass(frozen=True)
class Posterized(Augmentation):
    bits: int = 8


def test_choose_leaves_views_with_a_setting_that_is_new_to_it(monkeypatch, capsys):
    monkeypatch.setattr(use, "load", lambda path: pytest.fail("loaded"))
    use.say_once.cache_clear()
    views, said = [*VIEWS, Posterized(bits=4)], "the view operator does not know data.augmentation.bits"
    assert build.unknown(Posterized()) is None
    assert not use.choose("auto", "cpu", views) and said in capsys.readouterr().out
    with pytest.raises(DataError, match=said):
        use.choose(True, "cpu", views)


def test_load_passes_bytes_and_refuses_a_second_library(monkeypatch):
    """DALI takes no str that is not UTF-8, and would end the process at a second operator of the same name."""
    paths = []
    monkeypatch.setattr(use, "_loaded", [])
    monkeypatch.setattr("nvidia.dali.plugin_manager.load_library", paths.append)
    for _ in range(2):
        use.load(Path(os.fsdecode(b"caf\xe9/view.so")))
    with pytest.raises(RuntimeError, match=r"already loaded view\.so, so it cannot load second\.so"):
        use.load(Path("second.so"))
    assert paths == [b"caf\xe9/view.so"]


def test_loader_refuses_the_view_operator_where_torchvision_reads(index):
    with pytest.raises(DataError, match="view_operator: true is for DALI, but torchvision reads the images"):
        opened(unlabeled(index), "torchvision", view_operator=True)


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
    assert sorted(kind for kind, _ in functions if kind not in ("", "default")) == ["avx2", "avx512f"]
    for kind, body in functions:
        register = {"avx512f": "zmm", "avx2": "ymm"}.get(kind, "xmm")
        assert len(re.findall(rf"\bv?addps\b.*%{register}", body)) >= 4, kind
        assert not re.findall(r"\bv?mov\w+\s+%[xyz]mm\d+, -?\w*\(%r[sb]p\)", body), kind
