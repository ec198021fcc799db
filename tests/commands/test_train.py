"""The step of a dry run, and what a run says at its end."""

import re

import pytest
import torch

from fastsuncet import cli
from fastsuncet.optim import LARS
from fastsuncet.training import step
from tests.support.runs import SMALL

DRY = ["train", "digits_demo", "--dry-run=step", *SMALL]


@pytest.mark.slow
def test_dry_run_step_makes_one_update_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    update, calls = LARS.step, []
    monkeypatch.setattr(LARS, "step", lambda *given: calls.append(given) or update(*given))
    assert cli.main(DRY) == 0
    plan, end = capsys.readouterr().out.rsplit("\n\n", 1)
    assert "steps    4 an epoch, 10 in all" in plan and len(calls) == 1
    numbers = re.match(
        r"dry run: one step took ([\d.]+) s \(([\d.]+) s of it waiting for images; .*\) and at most ([\d.]+) GB of "
        r"resident memory on a process; nt_xent ([\d.]+), suncet ([\d.]+)\. Nothing was saved",
        end,
    )
    assert numbers is not None, end
    seconds, wait, memory, instance, supervised = map(float, numbers.groups())
    assert seconds >= wait > 0 and memory > 0.1 and instance > 1 and supervised > 0.1
    assert list(tmp_path.iterdir()) == []


def test_dry_run_step_that_does_not_fit_names_its_key_and_line(monkeypatch, capsys):
    call = step.nn.Module.__call__

    def full(module, *given):
        if getattr(given[0], "is_meta", False):  # the plan counts the network's cost
            return call(module, *given)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(step.nn.Module, "__call__", full)
    assert cli.main(DRY) == 2
    error = capsys.readouterr().err
    assert "command line: criterion.unsupervised_batch_size=360" in error
    assert "does not fit the GPU's memory: CUDA out of memory. Tried to allocate 20.00 GiB. Lower it" in error
