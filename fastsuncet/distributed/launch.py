"""Start a command on every GPU of this machine, through torchrun's own agent; on several nodes they meet at the first.

torchrun's command line turns every failure into exit code 1. The agent that is started from here passes on the code of
the first rank that left with a reason: it tells a scheduler to requeue the job (75) or never to retry it (2).
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch

from fastsuncet.distributed.place import nodes_to_start, slurm_endpoint
from fastsuncet.distributed.signals import STOP_SIGNALS
from fastsuncet.errors import FastSuncetError, Preempted
from fastsuncet.paths import cli_command
from pipelines import atomic_files

MEET = 600  # seconds, for which the agents of the nodes wait for the first one
REASONS = (2, 3, 4, 5, 75, 124)  # exit codes that state a reason, see errors.py


def start_ranks(arguments: list[str], status: Path) -> int:
    """Run `fastsuncet ARGUMENTS` on every GPU of this machine; return the exit code of the job.

    `status` is the run's status.json: after a signal the agent does not say how ranks ended, and this file does.
    """
    before = last_written(status)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nodes = nodes_to_start("cuda")
    endpoint = "{}:{}".format(*slurm_endpoint()) if nodes > 1 else "localhost:0"
    # The agent kills ranks 30 s after it passed on a signal; a save on a busy file system can take longer.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # torchrun's own default, without its warning: as many OpenMP threads as cores in every rank would slow all of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=torch.cuda.device_count(),
        run_id=os.environ.get("SLURM_JOB_ID", "fastsuncet"),
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        # Nodes start a minute apart where all of them import torch from one file server; the default is 60 s.
        rdzv_configs={"read_timeout": MEET},
        max_restarts=0,
        monitor_interval=0.5,
        signals_to_handle="SIGINT,SIGQUIT",
    )
    python, *words = cli_command()
    # The agent would raise for each repeated SIGTERM, die of SIGUSR1, and hear a SIGHUP that its ranks ignore.
    stops = [signal.Signals[name] for name in STOP_SIGNALS if name != "SIGINT"]

    def stop_once(*_: object) -> None:
        # Only once: the agent passes it on and waits for the ranks' save, and a second exception would end that wait.
        for number in stops:
            signal.signal(number, signal.SIG_IGN)
        raise SignalException("a stop was requested", sigval=signal.SIGTERM)

    try:
        for number in stops:
            signal.signal(number, stop_once)
        elastic_launch(config, python)(*words, *arguments)
    except ChildFailedError as error:
        return job_exit_code([(failure.exitcode, failure.timestamp) for failure in error.failures.values()])
    except RendezvousError as error:
        raise FastSuncetError(
            f"the first node's agent, at {endpoint}, did not start within {MEET} s or has ended, and this one with it; "
            "the first node's message has the reason"
        ) from error
    except SignalException as stop:
        code = atomic_files.read_object(status).get("exit_code")
        # What an earlier job wrote says nothing about this one, except that the same command continues the run.
        if code in (0, *REASONS) and (last_written(status) != before or code == Preempted.exit_code):
            return code
        # The ranks were killed, after their grace period or before they began. Return the signal's code, 143 for
        # SIGTERM.
        return 128 + int(stop.sigval)
    return 0


def job_exit_code(failures: Sequence[tuple[int, int]]) -> int:
    """Return the job's exit code, from (exit code, time in seconds) of each rank that failed.

    A rank that fails takes others with it: their connection breaks (1), or the agent ends them by SIGTERM, and after a
    grace period by SIGKILL. The cause is the first rank that left with a reason, else one that was killed, which is
    reported as a shell does it (137), else one that failed.
    """
    ended = sorted((second, code if code >= 0 else 128 - code) for code, second in failures)
    # Ranks that fail together can be seen in two adjacent seconds. A grace period takes half a minute or more.
    causes = [code for second, code in ended if second <= ended[0][0] + 1]
    # The agent's SIGTERM is never the cause.
    causes = [code for code in causes if code != 128 + signal.SIGTERM] or causes
    return next((code for _, code in ended if code in REASONS), max(1, *causes))


def last_written(path: Path) -> int | None:
    """Return when a file was written, in ns; None if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None
