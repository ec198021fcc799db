"""Whether a loader uses the color operator: what each setting means where it was built and where it was not."""

import pytest

from pipelines import backend
from pipelines.dali.plugin import use
from pipelines.data_errors import DataError
from tests.support.pictures import write_pictures
from tests.support.plugin import needs_plugin
from tests.support.streams import needs_dali, opened, unlabeled


@needs_dali
def test_choose_auto_without_a_built_plugin_is_dali_and_builds_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    assert not use.choose("auto", "cpu")
    assert list(tmp_path.iterdir()) == []


def test_choose_auto_on_a_gpu_is_dali():
    assert not use.choose("auto", "gpu") and not use.choose("graph", "gpu")


@needs_plugin
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_choose_plugin_that_is_not_built_names_the_command(monkeypatch, tmp_path, device):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    monkeypatch.setattr(use, "unavailable", lambda device: None)
    with pytest.raises(DataError) as error:
        use.choose("plugin", device)
    command = "python -m pipelines.dali.plugin" + (" --gpu" if device == "gpu" else "")
    assert f"this machine's {device.upper()}, which is not built; build it with: {command}. " in str(
        error.value
    )


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
    monkeypatch.setattr(use, "kept", lambda device: broken)
    monkeypatch.setattr(use, "_loaded", {})
    assert not use.choose("auto", "cpu")
    output = capsys.readouterr().out
    assert "The color operator cannot be loaded (" in output and f"Delete {broken} and run: " in output
    with pytest.raises(DataError, match=r"broken\.so cannot be loaded"):
        use.choose("plugin", "cpu")


@needs_dali
def test_load_refuses_a_second_library_of_the_same_operator(monkeypatch, tmp_path):
    """DALI would keep the first, and its pixels would prove the second."""
    monkeypatch.setattr(use, "_loaded", {"cpu": "first.so"})
    with pytest.raises(RuntimeError, match=r"already loaded first\.so, so it cannot load second\.so"):
        use.load(tmp_path / "second.so")


def test_loader_refuses_the_plugin_where_torchvision_reads(tmp_path, monkeypatch):
    plan = unlabeled(write_pictures(tmp_path, count=6, side=24))
    monkeypatch.setattr(backend, "dali_problem", lambda: "it is absent")
    with pytest.raises(DataError, match="plugin is an operator of DALI's, but torchvision reads the images"):
        opened(plan, color_operator="plugin")
    opened(plan)
