"""kill -9 at any moment, again and again: the run that the same command brings to its end is the undisturbed one."""

import json
import sys

import pytest

from tests.support.ranks import start_forked


def main(arguments: list[str]) -> None:
    from tools import kills

    sys.exit(kills.main(arguments))


# The seeds draw kills of the agent, of one rank and of all, in an evaluation, a save, a step and an export; and of one
# process in a save, a step and its start.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "kills", "seed"), [("digits_demo", 2, 4, 24463), ("digits_paws", 1, 3, 2119)]
)
def test_runs_killed_at_random_end_bit_identical(config, ranks, kills, seed, tmp_path):
    """tools/kills.py tells more, and does it a thousand times."""
    words = [str(tmp_path), "--config", config, "optimization.steps=12"]
    words += [f"--{name}={value}" for name, value in (("ranks", ranks), ("kills", kills), ("seed", seed))]
    tool = start_forked(main, words)
    tool.join()
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert tool.exitcode == 0, trials
    done = [kill for trial in trials for kill in trial["kills"]]
    assert len(done) >= kills
    assert any(kill["step"] > 2 for kill in done), "no kill after a first checkpoint: nothing was continued"
