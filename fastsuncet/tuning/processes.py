"""Run the child of one rank with a time limit: a hang, a lack of memory or a lost device costs the child alone."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fastsuncet.config import Config
from fastsuncet.console import cli_command
from fastsuncet.distributed.collectives import broadcast_json, gather_json
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.tuning.chooser import BASE, CONTENDER, PLAIN, Report, Rung, Values

POLL = 0.05  # seconds


def measure(config: Config, rung: Rung, base: Values, seconds: float, signals: SignalFlag) -> list[Report]:
    """Return the report of each rank's child on `rung`. Collective.

    The children of all ranks form a group of their own. `seconds` is the limit of each; a stop signal ends it at once.
    """
    sides = {PLAIN: {}, **({BASE: base} if base else {}), CONTENDER: {**base, **rung.values}}
    request = {
        "config": config.canonical(),
        "sides": sides,
        "clock": rung.clock,
        "exact": rung.exact,
        "ends": time.time() + 0.9 * seconds,
    }
    environment = {
        **os.environ,
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": str(broadcast_json(_free_port())),
    }
    # The children's first rank serves their store, and not torchrun's agent.
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        own = run_child(request, environment, seconds, signals)
    except OSError as error:  # no room for its files, no more processes
        own = {"problem": f"cannot be started: {error}"}
    return [Report(**report) for report in gather_json(own)]


def run_child(
    request: dict[str, Any], environment: dict[str, str], seconds: float, signals: SignalFlag
) -> dict[str, Any]:
    """Return the report of one child, or {"problem": why there is none}."""
    with tempfile.TemporaryDirectory(prefix="fastsuncet-tune-") as folder, tempfile.TemporaryFile() as output:
        asked, report = Path(folder, "request.json"), Path(folder, "report.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        command = child_command(asked, report)
        code = run_limited(command, output, seconds, lambda: signals.requested is not None, env=environment)
        if report.exists():
            return json.loads(report.read_text(encoding="utf-8"))
        if signals.requested is not None:
            return {"problem": f"stopped by {signals.requested}"}
        if code is None:
            return {"problem": f"not done after {seconds:.0f} s"}
        output.seek(0)
        last = (output.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return {"problem": f"{how}: {last}"}


def run_limited(
    command: list[str],
    output: IO[Any],
    seconds: float,
    stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> int | None:
    """Run a command for at most `seconds`, or until it is `stopped`; return its exit code, None if it was ended.

    Then it ends all processes that the command started, such as compilers and loaders. `output` gets what they print;
    `options` are those of subprocess.Popen.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    ends = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < ends and not stopped():
            time.sleep(POLL)
        return process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def child_command(request: Path, report: Path) -> list[str]:
    """Return the command of a child."""
    return [*cli_command(), "tune", "--child", str(request), str(report)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
