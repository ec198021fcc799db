"""Whether a loader uses the view operator: what each setting means, and when it is built."""

import pytest

from pipelines import backend
from pipelines.dali.plugin import use
from pipelines.data_errors import DataError
from tests.support.pictures import write_pictures
from tests.support.streams import needs_dali, opened, unlabeled


def test_choose_auto_on_a_gpu_is_dali():
    assert not use.choose("auto", "gpu") and not use.choose("graph", "gpu")


@needs_dali
@pytest.mark.parametrize("operator", ["auto", "plugin"])
def test_choose_builds_what_is_not_built(monkeypatch, tmp_path, capsys, operator):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setattr(use, "unavailable", lambda: None)
    calls = []
    monkeypatch.setattr(use, "build", lambda prove, **_: calls.append(prove) or tmp_path / "made.so")
    monkeypatch.setattr(use, "load", calls.append)
    assert use.choose(operator, "cpu") and calls[1:] == [tmp_path / "made.so"]
    assert "Building the view operator, once for this machine" in capsys.readouterr().out


@needs_dali
def test_choose_auto_without_a_compiler_is_dali_and_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    use.say_once.cache_clear()
    assert not use.choose("auto", "cpu") and not use.choose("auto", "cpu")
    assert "Falling back to DALI's own operators (same pixels, slower): " in (
        output := capsys.readouterr().out
    )
    assert "no C++ compiler: $CXX (no-such-compiler)" in output and list(tmp_path.iterdir()) == []
    assert output.count("Falling back") == 1


@needs_dali
def test_choose_plugin_that_cannot_be_built_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DataError, match=r"cannot be built here: no C\+\+ compiler"):
        use.choose("plugin", "cpu")


def test_choose_refuses_another_word():
    with pytest.raises(ValueError, match="one of auto, graph, plugin, not 'fused'"):
        use.choose("fused", "cpu")


@needs_dali
def test_choose_auto_falls_back_where_the_plugin_cannot_be_loaded(monkeypatch, tmp_path, capsys):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(use, "kept", lambda: broken)
    monkeypatch.setattr(use, "_loaded", [])
    use.say_once.cache_clear()
    assert not use.choose("auto", "cpu")
    output = capsys.readouterr().out
    assert "Falling back to DALI's own operators (same pixels, slower): Failed to load" in output
    with pytest.raises(DataError, match=r"color_operator: plugin: (.|\n)*broken\.so"):
        use.choose("plugin", "cpu")


@needs_dali
def test_load_refuses_a_second_library_of_the_same_operator(monkeypatch, tmp_path):
    """DALI would keep the first, and its pixels would prove the second."""
    monkeypatch.setattr(use, "_loaded", ["first.so"])
    with pytest.raises(RuntimeError, match=r"already loaded first\.so, so it cannot load second\.so"):
        use.load(tmp_path / "second.so")


def test_loader_refuses_the_plugin_where_torchvision_reads(tmp_path, monkeypatch):
    plan = unlabeled(write_pictures(tmp_path, count=6, side=24))
    monkeypatch.setattr(backend, "dali_problem", lambda: "it is absent")
    with pytest.raises(DataError, match="plugin is an operator of DALI's, but torchvision reads the images"):
        opened(plan, color_operator="plugin")
    opened(plan)
