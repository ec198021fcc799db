"""Compiled code on disk: for its owner alone, whatever the umask, and executed only if nobody else could write it."""

import os
from pathlib import Path
from unittest import mock

import pytest

from pipelines import code_cache, cuda_compiler


@pytest.mark.parametrize("name", ["folder", "file"])
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_read_gives_no_code_that_others_could_write(tmp_path, name, mode):
    path = tmp_path / "cache" / "code"
    code_cache.write(path, b"code")
    unsafe = path.parent if name == "folder" else path
    unsafe.chmod(mode)
    assert code_cache.read(path) is None
    said = f"other users can write to {unsafe}, and compiled code is executed"
    assert code_cache.problem(path).startswith(said)
    unsafe.chmod(0o755)
    assert code_cache.read(path) == b"code"


@pytest.mark.parametrize("name", ["folder", "file", "target of a link"])
def test_read_gives_no_code_of_another_user(tmp_path, monkeypatch, name):
    path = tmp_path / "cache" / "code"
    code_cache.write(path, b"code")
    theirs = path.parent if name == "folder" else path
    if name == "target of a link":
        theirs = tmp_path / "theirs"
        path.rename(theirs)
        path.symlink_to(theirs)
    real = Path.stat
    stat = real(theirs)
    owned = os.stat_result((*stat[:4], 12_345, *stat[5:]))
    monkeypatch.setattr(Path, "stat", lambda p, **k: owned if real(p, **k) == stat else real(p, **k))
    assert code_cache.read(path) is None


def test_private_folder_is_the_cache_or_a_new_one_where_others_could_write(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "cache"))
    folder = code_cache.private_folder("inductor")
    assert folder == tmp_path / "cache" / "inductor"
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700, 0o700]
    folder.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    new = code_cache.private_folder("inductor")
    assert new.parent == tmp_path and new.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(code_cache, "cache_folder", lambda kind: folder / "no" / kind)
    monkeypatch.setattr(code_cache.atomic_files, "make_folder", mock.Mock(side_effect=PermissionError))
    assert code_cache.private_folder("inductor") not in (folder, new)


def test_compiled_refuses_a_folder_of_others_and_says_so(tmp_path, monkeypatch, capsys):
    """It compiles anew, and neither reads there nor writes there."""
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_compiler, "version", lambda: (13, 0))
    monkeypatch.setattr(cuda_compiler, "compile_cuda", lambda *_: b"compiled here")
    source = tmp_path / "k.cu"
    source.write_text("kernel")

    def compiled():
        cuda_compiler.compiled.cache_clear()  # as in another process
        return cuda_compiler.compiled(source, "sm_90", ())

    compiled()
    (kept,) = (tmp_path / "kernels").iterdir()
    code_cache.write(kept, b"planted")
    assert compiled() == b"planted" and capsys.readouterr().out == ""
    kept.chmod(0o666)
    assert compiled() == b"compiled here"
    kept.unlink()
    kept.parent.chmod(0o777)
    assert compiled() == b"compiled here" and list(kept.parent.iterdir()) == []
    said = "Compiled k.cu and kept it in memory only: other"
    assert [line[: len(said)] for line in capsys.readouterr().out.splitlines()] == [said] * 2
    cuda_compiler.compiled.cache_clear()
