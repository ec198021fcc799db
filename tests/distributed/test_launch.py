"""From a command to ranks: torchrun's variables, Slurm's, one process, and the exit code that a scheduler gets."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from fastsuncet import cli
from fastsuncet.distributed import launch, place
from fastsuncet.distributed.place import explain_error, join, pick_device
from fastsuncet.distributed.signals import STOP_SIGNALS
from fastsuncet.errors import ConfigError, FastSuncetError, HungError
from pipelines.data_errors import DataError
from tests.support.ranks import start_forked, started_by_an_agent

pytestmark = pytest.mark.slow

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
}


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, ("13", "16", "5", "gpu003")),  # one Slurm task per rank
        ({"SLURM_JOB_NODELIST": "node7"}, ("13", "16", "5", "node7")),
        ({"SLURM_JOB_NODELIST": "a1,b[2-3]"}, ("13", "16", "5", "a1")),
        ({"SLURM_STEP_NODELIST": "rack-2-n[10,12],x"}, ("13", "16", "5", "rack-2-n10")),
        ({"SLURM_STEP_NODELIST": "r[1-2,4]n[01-07]-ib,x"}, ("13", "16", "5", "r1n01-ib")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("1", "2", None, None)),  # torchrun's own variables win
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, (None,) * 4),  # one process
    ],
)
def test_set_torchrun_variables_from_slurms(changes, ranks):
    with mock.patch.dict(os.environ, SLURM | changes, clear=True):
        place.set_torchrun_variables("auto")
        assert tuple(map(os.environ.get, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))) == ranks
        slurm = ranks[0] == "13"
        assert os.environ.get("LOCAL_WORLD_SIZE") == ("8" if slurm else None)
        # Of the job: another one on the same node meets elsewhere.
        assert os.environ.get("MASTER_PORT") == ("24567" if slurm else None)


@pytest.mark.parametrize(("device", "rank", "ranks"), [("cpu", "1", 2), ("auto", None, 16)])
def test_one_slurm_task_per_node_is_a_rank_or_starts_those_of_gpus(monkeypatch, device, rank, ranks):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with mock.patch.dict(os.environ, SLURM | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, clear=True):
        assert place.should_start_ranks(device) == (rank is None)
        assert (os.environ.get("RANK"), place.expected_ranks(device)) == (rank, ranks)


def test_start_ranks_meets_at_the_first_node_of_the_step(monkeypatch, tmp_path):
    seen, run = {}, mock.Mock(side_effect=[None, RendezvousConnectionError])
    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", lambda **given: seen.update(given))
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "gpu[007-008]", "OMP_NUM_THREADS": "1"}
    for name, value in (SLURM | step | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}).items():
        monkeypatch.setenv(name, value)
    assert launch.start_ranks([], tmp_path / "status.json") == 0
    found = {"min_nodes": 2, "max_nodes": 2, "nproc_per_node": 8, "rdzv_endpoint": "gpu007:24567"}
    found["signals_to_handle"] = "SIGINT,SIGQUIT"  # the others are this program's
    assert found.items() <= seen.items()
    with pytest.raises(FastSuncetError, match=r"first node's agent, at gpu007:24567, .* or has ended"):
        launch.start_ranks([], tmp_path / "status.json")


@pytest.mark.parametrize(
    ("gpus", "usable", "wanted", "local_rank", "found"),
    [
        (0, False, "cuda", 0, r"without --gpus all, .* meta\.device=cpu"),
        (0, False, "auto", 0, torch.device("cpu")),
        # Else eight ranks would train on the CPU.
        (8, False, "auto", 0, "no CUDA device can .* counts 8 and cannot use their driver: update"),
        (8, False, "cpu", 0, torch.device("cpu")),
        (8, True, "cpu", 0, torch.device("cpu")),
        (1, True, "auto", 5, torch.device("cuda", 0)),  # the only one that Slurm shows to a task
        (2, True, "auto", 2, "no GPU of its own"),
        # The first kernel would end the run with a traceback: "no kernel image is available".
        (9, True, "auto", 7, r"no code for a card, 7\.0: it has sm_75 sm_90\. .* meta\.device=cpu"),
    ],
)
def test_pick_device_is_the_ranks_own_or_says_what_to_do(
    monkeypatch, gpus, usable, wanted, local_rank, found
):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    old, new = (SimpleNamespace(name="a card", major=major, minor=0) for major in (7, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: old if number == 7 else new)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    refused = pytest.raises(ConfigError, match=found) if isinstance(found, str) else contextlib.nullcontext()
    with refused:
        assert pick_device(wanted, local_rank) == found


MEETING = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


def test_explain_error_of_another_rank_the_machine_and_any_other():
    broken = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    assert "another rank has ended" in str(explain_error(RuntimeError(broken)))
    late = "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
    assert isinstance(explain_error(RuntimeError(late)), HungError)
    full = "ncclSystemError: ...\nLast error:\nError while creating shared memory segment /dev/shm/nccl-1 (size 734)"
    assert "/dev/shm" in str(found := explain_error(RuntimeError(full))) and isinstance(found, ConfigError)
    bug = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert explain_error(bug) is bug


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x"}, "variable RANK is 'x', not a number"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "variable WORLD_SIZE is '-2'"),
        ({**MEETING, "MASTER_ADDR": ""}, "variable MASTER_ADDR is missing"),
        *(({**MEETING, "MASTER_PORT": port}, "a port is from 1 to 65535") for port in ("0", "91234")),
        ({**TASK, "SLURM_NTASKS": ""}, "variable SLURM_NTASKS is ''"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0, and WORLD_SIZE is 0"),
        (TASK, "variable SLURM_LOCALID is missing"),
        ({**TASK, "SLURM_LOCALID": "0"}, "variable SLURM_JOB_NODELIST is missing"),
    ],
)
def test_join_refuses_variables_that_are_no_numbers(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), join("cpu"):
        pass


def test_job_exit_code_is_the_causes_and_not_its_consequences():
    table = [
        ([(1, 10), (75, 10)], 75),
        ([(124, 50), (75, 10)], 75),  # saved, before a rank hung at its end
        ([(75, 10), (3, 10)], 3),
        ([(1, 10), (-9, 10)], 137),  # memory: the connection of the other broke
        ([(-15, 11), (-9, 10)], 137),  # and the agent ended it
        ([(1, 10), (-15, 10)], 1),  # a bug: the job must not run again
        ([(1, 10), (-9, 40)], 1),  # its peer waited in a collective through the agent's grace period
        ([(-15, 10), (4, 40)], 4),
        ([(124, 10), (-9, 40)], 124),  # a rank hung until the agent killed it
        ([(-15, 10)], 143),
        ([(1, 10), (-9, 11)], 137),
    ]
    for failures, code in table:
        assert launch.job_exit_code(failures) == launch.job_exit_code(failures[::-1]) == code, failures


# --------------------------------------------------------------------------------------- real processes, real agent


def _agent(folder: str, arguments: list[str], stand_in: str, ranks: int) -> None:
    """Run `launch.start_ranks` for some ranks in this process; the text of `stand_in` replaces our command line."""
    os.chdir(folder)
    os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    program = f"import os, signal, sys, time\nassert sys.argv[1:] == {arguments}\n{stand_in}\n"
    launch.cli_command = lambda: [sys.executable, "-c", program]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    torch.cuda.device_count = lambda: ranks
    sys.exit(launch.start_ranks(arguments, Path("status.json")))


def started_job(folder: Path, stand_in: str, *arguments: str, ranks: int = 2) -> multiprocessing.Process:
    folder.mkdir(exist_ok=True)
    return start_forked(_agent, str(folder), list(arguments), stand_in, ranks)


def exit_code(process: multiprocessing.Process, folder: Path) -> int | None:
    """Wait for the end of a job, and show what it said on its errors where a comparison fails."""
    process.join(240)
    print((folder / "errors").read_text()[-2000:])
    return process.exitcode


def wait_for(process: multiprocessing.Process, *files: Path) -> None:
    while not all(file.exists() for file in files):
        assert process.is_alive(), files[0].with_name("errors").read_text()
        time.sleep(0.05)


PREEMPTED, DONE, FAILED = (f'{{"exit_code": {code}}}' for code in (75, 0, 5))
STATUSES = [  # what an earlier job wrote, what this one writes, the code of this one
    ("", "", 143),
    ("", '{"exit_code": null}', 143),  # it was still running
    ("", '{"exit_code": 1}', 143),  # a connection to a rank that was killed
    ("", PREEMPTED, 75),
    ("", DONE, 0),
    ("", FAILED, 5),  # as where the encoder of a complete run cannot be exported
    (DONE, None, 143),  # of another job
    (FAILED, None, 143),
    (PREEMPTED, None, 75),  # the same command still continues it
]


def test_start_ranks_on_sigterm_returns_the_code_that_the_run_wrote(tmp_path):
    """Ranks that were killed before they had saved must not look like a saved run, nor a complete run like them."""
    jobs = []
    for number, (earlier, status, code) in enumerate(STATUSES):  # all wait at the same time
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "status.json").write_text(earlier)
        process = started_job(folder, "open('begun', 'w').close(); time.sleep(60)", ranks=1)
        jobs.append((folder, status, code, process))
    for folder, status, _, process in jobs:
        wait_for(process, folder / "begun")
        if status is not None:
            (folder / "status.json").write_text(status)
        os.kill(process.pid, signal.SIGTERM)
    for folder, _, code, process in jobs:
        assert exit_code(process, folder) == code


SAVING = """
def save(*_):
    open(f"saving {os.environ['RANK']}", "w").close()
    while not os.path.exists("repeated"):
        time.sleep(0.05)
    open("status.json", "w").write('{"exit_code": 75}')
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(os.environ['RANK'], 'w').close()
time.sleep(60)
"""


def test_start_ranks_ignores_a_repeated_signal_while_the_ranks_save(tmp_path):
    """Under nohup SIGHUP stops nothing, and is left out."""
    names = [name for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if name in STOP_SIGNALS]
    jobs = {name: started_job(tmp_path / name, SAVING) for name in names}
    for files in (("0", "1"), ("saving 0", "saving 1")):
        for name, process in jobs.items():
            wait_for(process, *(tmp_path / name / file for file in files))
            os.kill(process.pid, signal.Signals[name])
    for _ in range(3):
        time.sleep(0.2)
        for name, process in jobs.items():
            os.kill(process.pid, signal.Signals[name])
    for name, process in jobs.items():
        (tmp_path / name / "repeated").touch()
        assert exit_code(process, tmp_path / name) == 75


RANK = """
from fastsuncet import cli
from fastsuncet.distributed.signals import SignalFlag
def train(arguments):
    with SignalFlag() as signals:
        open(os.environ['RANK'], 'w').close()
        for _ in range(2000):
            if signals.requested is None:
                time.sleep(0.05)
        open(f"saved {os.environ['RANK']}", 'w').write(str(signals.requested))
    return 75
cli._dispatch = train
sys.exit(cli.main())
"""


def test_ranks_whose_agent_was_killed_save_and_end(tmp_path):
    process = started_job(tmp_path, RANK)
    wait_for(process, tmp_path / "0", tmp_path / "1")
    process.kill()
    saved = [tmp_path / "saved 0", tmp_path / "saved 1"]
    end = time.monotonic() + 60
    while not all(path.exists() and path.read_text() == "SIGTERM" for path in saved):
        assert time.monotonic() < end, "a rank goes on without its agent"
        time.sleep(0.05)


def test_rank_whose_agent_was_killed_before_it_came_ends(monkeypatch):
    """The kernel sends no SIGTERM to a rank that asks for it after its agent's end."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(place, "CONNECT", timedelta(seconds=1))
    refused = pytest.raises(HungError, match="nothing answers at MASTER_ADDR")
    with mock.patch.dict(os.environ), refused:
        started_by_an_agent(1, agents.port)
        del agents
        with join("cpu"):
            pass


def _join(rank: int, port: int, late: float) -> None:
    started_by_an_agent(rank, port)
    time.sleep(late)
    with join("cpu"):
        dist.barrier()  # else one can end while the other still connects


def test_join_of_ranks_that_an_agent_started_again_passes_over_those_that_ended():
    """The agent's store still has the addresses of the ranks before, which nobody answers at."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for late in (0, 1):
        first, other = (start_forked(_join, rank, store.port, late * (rank == 0)) for rank in (0, 1))
        for process in (other, first):
            process.join(20)
            process.kill()
        assert (first.exitcode, other.exitcode) == (0, 0)


def test_rank_says_for_whom_it_waits_and_that_its_port_is_in_use(monkeypatch, capsys):
    """As one in a batch script without srun, and as one of a second job on the same machine."""
    monkeypatch.setattr(place, "NOTICE", 0.1)
    monkeypatch.setattr(place, "START", timedelta(seconds=1))
    alone = TASK | {"SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "localhost"}
    with mock.patch.dict(os.environ, alone), pytest.raises(HungError), join("cpu"):
        pass
    waits = r"\[rank 0\] waiting for 1 other rank at localhost:29511, .* write srun before"
    assert re.match(waits, capsys.readouterr().err)
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        refused = pytest.raises(ConfigError, match=f"MASTER_PORT is {port}, and another process")
        with mock.patch.dict(os.environ, {**MEETING, "MASTER_PORT": port}), refused, join("cpu"):
            pass


def _fail_in_a_group(rank: int, port: int, folder: str, error: type[Exception]) -> None:
    """Be a rank whose command fails while the other one waits, and whose end is aborted by the group's threads."""
    started_by_an_agent(rank, port)
    os.dup2(os.open(f"{folder}/errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = ["fastsuncet", "train"]

    def fail(arguments: list[str]) -> int:
        with join("cpu") as place:
            if place.first:
                time.sleep(60)
            raise error("damaged: " + 50_000 * "x" + " end")

    cli._dispatch = fail
    cli.main()
    os.abort()


@pytest.mark.parametrize(("error", "code"), [(DataError, 3), (ZeroDivisionError, 1)])
def test_rank_that_fails_in_its_group_ends_with_its_code_and_whole_message(tmp_path, error, code):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = (store.port, str(tmp_path), error)
    other, failed = (start_forked(_fail_in_a_group, rank, *words) for rank in (0, 1))
    assert exit_code(failed, tmp_path) == code
    other.kill()
    assert "damaged: " + 50_000 * "x" + " end\n" in (tmp_path / "errors").read_text()


WRONG = """
from fastsuncet.cli import main
sys.argv += ["optimization.lr=-1"] * (os.environ["RANK"] == "1")
sys.exit(main())
"""


def test_start_ranks_ends_a_job_whose_config_is_wrong_on_one_rank_only(tmp_path):
    """The other rank waits for all to start; the agent ends it once this one has left."""
    process = started_job(tmp_path, WRONG, "train", "digits_demo", f"logging.folder={tmp_path / 'runs'}")
    assert exit_code(process, tmp_path) == 2
    assert "optimization.lr" in (said := (tmp_path / "errors").read_text()) and "must be" in said
    assert not (tmp_path / "runs").exists()
