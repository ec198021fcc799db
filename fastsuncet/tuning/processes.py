"""Run a child with a time limit: a hang, a lack of memory or a lost device costs the child alone."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.utils.distributed import get_free_port

from fastsuncet.config import Arithmetic, Config
from fastsuncet.distributed.collectives import broadcast_json, gather_json
from fastsuncet.paths import cli_command
from fastsuncet.tuning.verdicts import Verdict, judge

POLL = 0.05  # seconds
# Where a traceback of Python, or the end of a C++ program, has the error. Three lines of advice follow one of CUDA.
ERROR = re.compile(r"^(?:[\w.]+(?:Error|Exception)\b| *what\(\): ).*", re.MULTILINE)
VOTE = 1.0  # seconds between two looks at the other ranks


def run_child(
    request: Mapping[str, Any], environment: Mapping[str, str], go_on: Callable[[int | None], bool]
) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of JSON that one child wrote, and how it ended, for a message. `go_on` as in `run_while`."""
    try:
        with tempfile.TemporaryDirectory(prefix="fastsuncet-") as folder, tempfile.TemporaryFile() as output:
            asked, report = Path(folder, "request.json"), Path(folder, "report.jsonl")
            asked.write_text(json.dumps(request), encoding="utf-8")
            report.touch()
            code = run_while(child_command(asked, report), output, go_on, env=dict(environment))
            # What was killed while it wrote has left half a line.
            whole = report.read_text(encoding="utf-8").rpartition("\n")[0]
            lines = [json.loads(line) for line in whole.splitlines()]
            output.seek(0)
            last = last_error(output.read().decode(errors="replace"))
    except OSError as error:  # no room for its files, no more processes
        return [], f"cannot be started: {error}"
    if code is None:
        return lines, "was stopped, or took too long"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return lines, f"{how}: {last}"


def last_error(output: str) -> str:
    """Return the line of a program's output that has its last error; without one the last line."""
    return (ERROR.findall(output) or output.strip().splitlines() or ["no output"])[-1].strip()


def request_of(
    config: Config, arithmetic: Arithmetic, per_class: Sequence[int], paths: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return what a child must know of a run: its config, sizes, labeled images of each class, and fast paths."""
    used = {path: reason is None for path, reason in paths.items()}
    sizes = {"arithmetic": vars(arithmetic), "per_class": list(per_class)}
    return {"config": config.canonical(), **sizes, "paths": used}


def compare(
    request: Mapping[str, Any],
    base: Mapping[str, Any],
    contender: Mapping[str, Any],
    seconds: float,
    stopped: Callable[[], bool],
) -> Verdict:
    """Prove and time one set of config values against another, in a child of every rank. Collective.

    `request` is `request_of`'s. The children of all ranks form a group of their own. As soon as one fails, takes longer
    than `seconds` or is `stopped`, all are ended, and another try can find something else.
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        **os.environ,
        "MASTER_PORT": str(broadcast_json(get_free_port())),
    }
    # The children's first rank serves their store, and not torchrun's agent.
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    in_time, over = limited(seconds, stopped), False

    def all_go_on(code: int | None) -> bool:
        nonlocal over
        time.sleep(VOTE)
        everywhere = gather_json([code, in_time(None)])
        failed = any(code or not go for code, go in everywhere)
        over = failed or all(code is not None for code, _ in everywhere)
        return not over

    lines, end = run_child({**request, "base": base, "contender": contender}, environment, all_go_on)
    if not over:  # this rank's did not start, and the others vote
        all_go_on(1)
    failed = {"problem": f"the process that tried it {end}", "final": False}
    return judge([Verdict(**each) for each in gather_json(lines[-1] if lines else failed)])


def run_while(
    command: list[str], output: IO[Any], go_on: Callable[[int | None], bool], **options: Any
) -> int | None:
    """Run a command as long as `go_on(its exit code, or None)`; return its exit code, None if it was ended.

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
    try:
        while go_on(process.poll()):
            time.sleep(POLL)
        return process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def limited(seconds: float, stopped: Callable[[], bool] = lambda: False) -> Callable[[int | None], bool]:
    """Return a `go_on` that ends a command after `seconds`, or as soon as it is `stopped`."""
    ends = time.monotonic() + seconds
    return lambda code: code is None and time.monotonic() < ends and not stopped()


def child_command(request: Path, report: Path) -> list[str]:
    """Return the command of a child."""
    return [*cli_command(), "tune", "--child", str(request), str(report)]
