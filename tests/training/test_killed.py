"""kill -9 at any moment, again and again: the run that the same command brings to its end is the undisturbed one."""

import json
import multiprocessing
import sys

import pytest

from tests.support.pictures import write_pictures
from tests.support.ranks import PRELOADED


def main(arguments: list[str]) -> None:
    from tools import kills

    sys.exit(kills.main(arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), [("digits_demo", 2), ("digits_paws", 1)])
def test_runs_killed_at_random_end_bit_identical(config, ranks, tmp_path):
    """tools/kills.py tells more, and does it a thousand times."""
    write_pictures(tmp_path / "images", count=44, classes=4, side=24)
    # A server that has torch and DALI imported forks the tool.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    words = [str(tmp_path), "--images", str(tmp_path / "images"), "--kills", "6"]
    words += ["--ranks", str(ranks), "--config", config]
    tool = context.Process(target=main, args=(words,))
    tool.start()
    tool.join()
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert tool.exitcode == 0, trials
    kills = [kill for trial in trials for kill in trial["kills"]]
    assert len(kills) >= 6
    assert any(kill["step"] > 2 for kill in kills), "no kill after a first checkpoint: nothing was continued"
