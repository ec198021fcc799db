"""A run goes on when its standard output is lost: the reader of a pipe has ended, or a log's disk is full."""

import subprocess

import pytest

from fastsuncet.console import cli_command
from tests.support.runs import CONFIGS, SMALL, metrics

SHORT = (
    "optimization.steps=3",
    "optimization.warmup=0",
    "logging.log_every=1",
    "criterion.unsupervised_batch_size=32",
)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["pipe", "disk", "both"])
def test_training_goes_on_without_its_standard_output(lost, tmp_path):
    words = ["train", str(CONFIGS / "digits_demo.yaml"), *SMALL, *SHORT, f"logging.folder={tmp_path}"]
    with open("/dev/full", "w") as full, open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen(
            [*cli_command(), *words],
            stdout=full if lost == "disk" else subprocess.PIPE,
            stderr=subprocess.STDOUT if lost == "both" else errors,
            text=True,
        )
    if lost != "disk":
        assert process.stdout.readline().startswith("run ")
        process.stdout.close()  # as `| head -1` does
    assert process.wait(300) == 0, (tmp_path / "errors").read_text()
    notes = (tmp_path / "errors").read_text().count("the output cannot be written any more")
    assert notes == (0 if lost == "both" else 1)
    assert metrics(tmp_path / "digits_demo")[-1]["step"] == 3
