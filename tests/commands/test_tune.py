"""`fastsuncet tune` times contenders and writes a config with those that won."""

import contextlib
import io
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsuncet import cli
from fastsuncet.commands import tune
from fastsuncet.commands.tune import candidates
from fastsuncet.config import load_config
from fastsuncet.errors import ConfigError
from fastsuncet.tuning.verdicts import Verdict
from pipelines import backend
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, shorten_tuning

# One rung is left: the others are written.
WRITTEN = ("meta.compile=false", "data.decode_threads=1")
SMALL = ("criterion.unsupervised_batch_size=20", "criterion.supervised_imgs_per_class=2")


def tune_on_a_rank(rank: int, world_size: int, folder: str) -> str:
    """Tune as the command does, and return what it prints."""
    words = [str(CONFIGS / "digits_demo.yaml"), *WRITTEN, *SMALL, f"logging.folder={folder}"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(tune.Verdict, "won", property(lambda outcome: outcome.problem is None))
        shorten_tuning(patch)
        assert cli.main(["tune", *words, "--minutes", "20", "--output", f"{folder}/fast.yaml"]) == 0
    return printed.getvalue()


@pytest.mark.slow
def test_tune_the_demo_on_two_ranks_and_train_what_it_wrote(tmp_path):
    printed, _ = run_ranks(tune_on_a_rank, 2, str(tmp_path))
    assert "\nread-ahead: 3            won         " in printed and " ms (" in printed
    assert f"wrote {tmp_path}/fast.yaml: 1 of 1 contenders won." in printed
    text = (tmp_path / "fast.yaml").read_text()
    assert "base: digits_demo\n" in text and ", 2 processes\n  prefetch: 3\n" in text
    config = load_config(tmp_path / "fast.yaml")
    assert config.data.prefetch == 3 and config.optimization == load_config("digits_demo").optimization


def test_tune_stops_on_a_signal_and_counts_trials_of_kernels(monkeypatch, run_cli):
    """The process that started several ranks reads the exit code. Trials of kernels are part of the minutes."""
    clock, status = [0.0], Path(".preempted-fast.json")
    command = f"tune digits_demo {' '.join(WRITTEN)} --minutes 1 --output fast.yaml"
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    monkeypatch.setattr(tune.processes, "compare", lambda *_: pytest.fail("a contender is tried"))
    monkeypatch.setattr(tune.fast_paths, "choose", lambda *_: signal.raise_signal(signal.SIGTERM) or {})
    assert run_cli(command, code=75) and json.loads(status.read_text())["exit_code"] == 75
    monkeypatch.setattr(tune.fast_paths, "choose", lambda *_: clock.append(61.0) or {})
    assert "read-ahead: 3            not tried   no time left" in run_cli(command) and not status.exists()


def test_tune_tries_each_contender_on_those_that_won(run_cli, monkeypatch):
    rungs = [("a", {"data.prefetch": 3}), ("b", {"meta.threads": 2}), ("c", {"meta.threads": 1})]
    faster, equal = Verdict(base=[2.0], contender=[1.0]), Verdict(base=[1.0], contender=[1.0])
    asked, found = [], iter([faster, Verdict("other bits"), equal])
    monkeypatch.setattr(tune, "candidates", lambda *_: rungs)
    monkeypatch.setattr(tune.processes, "compare", lambda _, *sides: asked.append(sides[:2]) or next(found))
    run_cli("tune digits_demo --output fast.yaml")
    won = {"data.prefetch": 3}
    assert asked == [({}, won), (won, {**won, "meta.threads": 2}), (won, {**won, "meta.threads": 1})]


def test_tune_replaces_no_file(run_cli):
    Path("fast.yaml").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("file").touch()
    for words, code, problem in (
        ("fast.yaml", 2, "or remove it"),
        ("fast.png", 2, "must end in .yaml"),
        ("new.yaml --minutes nan", 2, "--minutes must be a number above 0"),
        ("loop/fast.yaml", 5, "symbolic links"),  # before the first trial
        ("file/fast.yaml", 5, "file/fast.yaml cannot be written: [Errno 20] Not a directory"),
    ):
        assert problem in run_cli(f"tune digits_demo --output {words}", code=code)


def test_written_config_has_the_keys_that_won_with_their_gains():
    """A base that is not shipped is named by its path from the new file; of two winners of a key the last counts."""
    base = Path("mine/run.yaml")
    base.parent.mkdir()
    base.write_text("base: digits_demo\n")

    def outcome(name: str, values: dict, seconds: float) -> tuple[tuple, Verdict]:
        return (name, values), Verdict(base=[0.02, 0.021], contender=[seconds])

    found = [
        outcome("CUDA graph", {"meta.cuda_graph": True}, 0.01),
        outcome("compile", {"meta.compile": True, "meta.cuda_graph": False}, 0.005),
        outcome("slow", {"data.decode_threads": 9}, 0.03),
    ]
    written = Path("new/fast.yaml")
    tune.write(written, base, found, "a card")
    assert written.read_text().splitlines()[1:] == [
        "base: ../mine/run.yaml",
        "meta:",
        "  # compile: 20.5 ms (20 to 21) -> 5 ms (5 to 5) a step, 4.10x, a card",
        "  cuda_graph: false",
        "  # compile: 20.5 ms (20 to 21) -> 5 ms (5 to 5) a step, 4.10x, a card",
        "  compile: true",
    ]
    assert load_config(written).meta.compile is True
    with pytest.raises(ConfigError, match=r"fast\.yaml exists\. (?s:.*) compile: true"):
        tune.write(written, base, found, "a card")


def test_candidates_are_what_is_not_written_and_can_run_here(monkeypatch):
    def keys(*overrides: str, device: str = "cuda") -> set[str]:
        config = load_config("digits_demo", overrides)
        plain = config.with_values({"meta.cuda_graph": False, "model.fused_batchnorm": True})
        return {key for _, values in candidates(config, plain, device) for key in values}

    monkeypatch.setattr(backend, "cores", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = load_config("digits_demo")
    counts = {values.get("data.decode_threads") for _, values in candidates(config, config, "cpu")}
    assert counts - {None} == {1, 4, 9}  # 8 is what a process has
    assert keys(*WRITTEN, device="cpu") == {"data.prefetch"}  # the demo's own file has threads
    expected = {"meta.cuda_graph", "meta.compile", "model.fused_batchnorm"}
    assert keys() == {*expected, "data.decode_threads", "data.prefetch"}
    files = ("data.kind=images", "data.root=x", "data.split.kind=none", "data.split.fraction=null")
    files += ("data.validation=null", "criterion.supervised_epochs=0", "evaluation.knn_every_epochs=null")
    assert "data.hw_decoder_share" in keys(*files)
    # compile turns it off
    assert "meta.compile" not in keys("model.fused_batchnorm=true")
    assert not {"meta.cuda_graph", "meta.compile"} & keys("criterion.micro_batch=64")
    monkeypatch.setenv("PATH", "")  # without a compiler
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert "meta.compile" not in keys()
