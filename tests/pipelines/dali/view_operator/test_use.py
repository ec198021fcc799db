"""Whether a loader uses the view operator: what each setting means, and when it is built."""

import pytest

from pipelines import backend
from pipelines.dali.view_operator import use
from pipelines.data_errors import DataError
from tests.support.streams import needs_dali, opened, unlabeled


def test_choose_auto_on_a_gpu_is_dali():
    assert not use.choose("auto", "gpu") and not use.choose(False, "gpu")


@needs_dali
@pytest.mark.parametrize("operator", ["auto", True])
def test_choose_builds_what_is_not_built(monkeypatch, tmp_path, capsys, operator):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setattr(use, "unavailable", lambda: None)
    calls = []
    monkeypatch.setattr(use, "build", lambda prove, **_: calls.append(prove) or tmp_path / "made.so")
    monkeypatch.setattr(use, "load", calls.append)
    assert use.choose(operator, "cpu") and calls[1:] == [tmp_path / "made.so"]
    assert "Building the view operator, once for this machine" in capsys.readouterr().out


@needs_dali
def test_choose_without_a_compiler_is_dali_or_an_error_and_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    use.say_once.cache_clear()
    assert not use.choose("auto", "cpu") and not use.choose("auto", "cpu")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Falling back to DALI's own operators (same pixels, slower): ")
    assert "no C++ compiler: $CXX (no-such-compiler)" in line and list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"cannot be built here: no C\+\+ compiler"):
        use.choose(True, "cpu")


@needs_dali
def test_choose_auto_falls_back_where_the_view_operator_cannot_be_loaded(monkeypatch, tmp_path, capsys):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(use, "kept", lambda: broken)
    monkeypatch.setattr(use, "_loaded", [])
    use.say_once.cache_clear()
    assert not use.choose("auto", "cpu")
    output = capsys.readouterr().out
    assert "Falling back to DALI's own operators (same pixels, slower): Failed to load" in output
    with pytest.raises(DataError, match=r"view_operator: true: (.|\n)*broken\.so"):
        use.choose(True, "cpu")


@needs_dali
def test_load_refuses_a_second_library_of_the_same_operator(monkeypatch, tmp_path):
    """DALI would keep the first, and its pixels would prove the second."""
    monkeypatch.setattr(use, "_loaded", ["first.so"])
    with pytest.raises(RuntimeError, match=r"already loaded first\.so, so it cannot load second\.so"):
        use.load(tmp_path / "second.so")


def test_loader_refuses_the_view_operator_where_torchvision_reads(index, monkeypatch):
    monkeypatch.setattr(backend, "dali_problem", lambda: "it is absent")
    with pytest.raises(
        DataError, match="true asks for an operator of DALI's, but torchvision reads the images"
    ):
        opened(unlabeled(index), view_operator=True)
    opened(unlabeled(index))
