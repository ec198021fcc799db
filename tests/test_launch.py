"""From a command to ranks: torchrun's variables, Slurm's, one process, and the exit code a scheduler sees."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastsuncet import launch
from fastsuncet.distributed import gather_json
from fastsuncet.errors import ConfigError
from fastsuncet.vote import Vote
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
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
    lost = launch.in_words(
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    )
    assert "another rank has ended" in str(lost)
    bug = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert launch.in_words(bug) is bug


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="no GPU of its own"):
        launch.pick_device("auto", 2)


def job_of_two(rank_program: str, folder: Path) -> subprocess.Popen:
    """Two ranks of a stand-in for `python -m fastsuncet`; the agent, its processes and their codes are torchrun's."""
    package = folder / "fastsuncet"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import os, signal, sys, time\nassert sys.argv[1:] == ['train', 'x.yaml']\n{rank_program}\n"
    )
    script = (
        f"import sys, torch; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\nfrom fastsuncet import launch\n"
        "torch.cuda.device_count = lambda: 2\n"
        "sys.exit(launch.start_ranks(['train', 'x.yaml'], Path('status.json')))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("code", [0, 3, 75, 137])
def test_the_job_ends_with_the_exit_code_of_the_rank_that_failed_first(code, tmp_path):
    # Rank 0 loses its connection to rank 1 at the same moment, and would win a tie of whole seconds.
    program = (
        f"code = {code} if os.environ['RANK'] == '1' or {code} in (0, 75) else 1\n"
        "if code == 137: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(code)"
    )
    process = job_of_two(program, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors[-2000:]


def test_a_job_whose_ranks_were_killed_before_they_had_saved_ends_as_killed_and_not_as_saved(tmp_path):
    process = job_of_two("open(os.environ['RANK'], 'w').close(); time.sleep(60)", tmp_path)
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors[-2000:]


def _vote(rank: int, world_size: int) -> list:
    vote = Vote()
    answers = [vote(rank == 2 and step == 1) for step in range(5)]
    vote.close()
    return gather_json(answers)


def test_all_ranks_hear_of_a_signal_to_one_of_them_at_the_same_step():
    for answers in run_ranks(_vote, 3):
        assert answers == [[False, False, True, True, True]] * 3


def test_a_single_process_acts_on_a_signal_at_once():
    vote = Vote()
    assert [vote(False), vote(True)] == [False, True]
