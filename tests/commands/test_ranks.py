"""Commands on several GPUs: the process that a user starts runs the same command on each, and ends with its code."""

from pathlib import Path

import pytest

from fastsuncet import cli
from fastsuncet.commands import dry_run, ranks
from fastsuncet.distributed import launch


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["train", "digits_demo"], "runs/digits_demo/status.json"),
        (["train", "digits_demo", "--dry-run=step"], "/dev/null"),
        (["tune", "digits_demo", "--output", "fast.yaml"], ".preempted-fast.json"),
        (["evaluate", "knn", "digits_demo"], "/dev/null"),
        (["finetune", "digits_demo", "--step", "3"], "runs/digits_demo/finetune/.preempted-*.json"),
        (["transfer", "digits_demo", "transfer.root=."], "runs/digits_demo/transfer/status-1-of-1.json"),
    ],
)
@pytest.mark.parametrize("code", [0, 75])
def test_command_on_several_gpus_ends_with_the_code_of_its_ranks(tmp_path, monkeypatch, words, status, code):
    started = []
    monkeypatch.chdir(tmp_path)
    for module in (ranks, dry_run):
        monkeypatch.setattr(module, "should_start_ranks", lambda device: True)
    monkeypatch.setattr(launch, "start_ranks", lambda *given: started.append(given) or code)
    assert cli.main(words) == code
    ((arguments, path),) = started
    assert arguments == words and Path(path).match(status)
    assert list(tmp_path.iterdir()) == []
