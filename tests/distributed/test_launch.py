"""From a command to ranks: torchrun's variables, Slurm's, one process, and the exit code a scheduler sees."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from fastsuncet.distributed import launch
from fastsuncet.distributed.collectives import gather_json
from fastsuncet.distributed.stop_consensus import StopConsensus
from fastsuncet.errors import ConfigError
from tests.support.ranks import PRELOADED, run_ranks
from tests.support.runs import CONFIGS, SMALL
from tests.test_main import shadow

SLURM = {
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[003-006,9],login", "gpu003"),
        ("node7", "node7"),
        ("a1,b[2-3]", "a1"),
        ("rack-2-n[10,12]", "rack-2-n10"),
    ],
)
def test_the_first_host_of_slurms_list_is_where_ranks_meet(nodelist, host):
    assert launch.first_host(nodelist) == host


def test_one_slurm_task_a_rank_becomes_torchruns_variables():
    environment = dict(SLURM)
    launch.adopt_slurm(environment)
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("13", "16", "5")
    assert environment["MASTER_ADDR"] == "gpu003"


def test_torchruns_own_variables_win_over_slurms():
    environment = SLURM | {"RANK": "1", "WORLD_SIZE": "2"}
    launch.adopt_slurm(environment)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("1", "2")


def test_a_single_slurm_task_is_one_process():
    environment = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
    launch.adopt_slurm(environment)
    assert "RANK" not in environment


def test_asking_for_a_gpu_where_there_is_none_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"meta\.device=cpu"):
        launch.pick_device("cuda", 0)
    assert launch.pick_device("auto", 0) == torch.device("cpu")


def test_a_task_to_which_slurm_gave_one_gpu_of_its_own_takes_that_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    assert launch.pick_device("auto", 5) == torch.device("cuda", 0)


def test_a_lost_connection_is_told_as_what_it_is_and_other_errors_as_they_are():
    lost = launch.explain_error(
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    )
    assert "another rank has ended" in str(lost)
    bug = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert launch.explain_error(bug) is bug


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="no GPU of its own"):
        launch.pick_device("auto", 2)


def _agent(folder: str, arguments: list[str], stand_in: str | None) -> None:
    """Run `launch.start_ranks` for two ranks in this process; the text of `stand_in` replaces our command line."""
    os.chdir(folder)
    os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    if stand_in is not None:
        program = f"import os, signal, sys, time\nassert sys.argv[1:] == {arguments}\n{stand_in}\n"
        launch.cli_command = lambda: [sys.executable, "-c", program]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    torch.cuda.device_count = lambda: 2
    sys.exit(launch.start_ranks(arguments, Path("status.json")))


def job_of_two(
    folder: Path, stand_in: str | None = None, arguments: tuple[str, ...] = ("train", "x.yaml")
) -> multiprocessing.Process:
    """Start the agent in `folder`, forked from a server that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_agent, args=(str(folder), list(arguments), stand_in))
    process.start()
    return process


BROKEN = "sys.exit(1)"  # what a rank does whose connection to another broke
WAITS = "time.sleep(60)"  # and one in a collective, until the agent ends it by SIGTERM


@pytest.mark.parametrize(
    ("first", "other", "code"),
    [
        ("sys.exit(0)", "sys.exit(0)", 0),
        # Both at the same moment: the other would win a tie of whole seconds.
        ("sys.exit(3)", BROKEN, 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", WAITS, 137),
        ("sys.exit(1)", WAITS, 1),
    ],
)
def test_the_job_ends_with_the_exit_code_of_the_rank_that_failed_first(first, other, code, tmp_path):
    program = f"if os.environ['RANK'] == '1': {first}\n{other}"
    process = job_of_two(tmp_path, program)
    process.join(120)
    assert process.exitcode == code, (tmp_path / "errors").read_text()[-2000:]


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([(1, 10), (75, 10)], 75),
        ([(1, 10), (-9, 10)], 137),  # memory: the connection of the other broke
        ([(-15, 11), (-9, 10)], 137),  # and the agent ended it
        ([(1, 10), (-15, 10)], 1),  # a bug; nobody is to run it again
        ([(1, 10), (-9, 40)], 1),  # its peer waited in a collective through the agent's grace period
        ([(-15, 10), (4, 40)], 4),
        ([(-15, 10)], 143),
        ([(1, 10), (-9, 11)], 137),
    ],
)
def test_a_kill_is_told_from_its_echo(failures, code):
    assert launch.exit_code(failures) == launch.exit_code(failures[::-1]) == code


def test_a_job_whose_ranks_were_killed_before_they_had_saved_ends_as_killed_and_not_as_saved(tmp_path):
    process = job_of_two(tmp_path, "open(os.environ['RANK'], 'w').close(); time.sleep(60)")
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert process.is_alive(), (tmp_path / "errors").read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 143, (tmp_path / "errors").read_text()[-2000:]


def _vote(rank: int, world_size: int) -> list:
    consensus = StopConsensus()
    answers = [consensus.agree(rank == 2 and step == 1) for step in range(5)]
    consensus.close()
    return gather_json(answers)


def test_all_ranks_hear_of_a_signal_to_one_of_them_at_the_same_step():
    for answers in run_ranks(_vote, 3):
        assert answers == [[False, False, True, True, True]] * 3


def test_a_single_process_acts_on_a_signal_at_once():
    consensus = StopConsensus()
    assert [consensus.agree(False), consensus.agree(True)] == [False, True]


def test_launch_two_ranks_train_in_a_folder_with_packages_of_our_names(tmp_path):
    shadow(tmp_path, "fastsuncet", "pipelines", "yaml.py")
    overrides = (
        "data.backend=torchvision",
        "optimization.warmup=0",
        "optimization.steps=2",
        f"logging.folder={tmp_path}",
    )
    process = job_of_two(tmp_path, None, ("train", str(CONFIGS / "digits_demo.yaml"), *SMALL, *overrides))
    process.join(240)
    assert process.exitcode == 0, (tmp_path / "errors").read_text()[-2000:]
    (status,) = tmp_path.glob("*/status.json")
    assert {"state": "done", "step": 2, "world_size": 2}.items() <= launch.read_status(status).items()
