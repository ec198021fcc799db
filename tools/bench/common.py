"""What the bench tools share: interleaved rounds, counts at torch's dispatcher, resident memory, table and JSON.

Machines are shared, so no figure stands alone: contenders take turns, and a ratio is taken inside each round,
where both sides met the same load. Medians, with the smallest and largest round beside them.
"""

import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastsuncet.errors import FastSuncetError
from pipelines.data_errors import DataError

# Each of these hands a value of the device to Python or sizes its result by one: on a GPU the host waits.
WAITS = {
    "_local_scalar_dense",
    "is_nonzero",
    "item",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
}
WRITE_ONLY = {"zero_", "fill_", "copy_", "zero", "fill", "copy"}  # they do not read what they overwrite

# Children fork from a server that has torch loaded and has never computed: a clean heap at no import's price.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torchvision.transforms.v2", "PIL.Image"])


class Counter(TorchDispatchMode):
    """Counts what happens inside it, backward passes included.

    operators: calls that reach a kernel, views left out. A GPU launches at least as many kernels.
    waits: calls after which the host must wait for the device, by the list above and for boolean indexing.
    moved: bytes of all operands that operators read, plus bytes they write.
    peak: largest sum of bytes of storages that were made inside and still lived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.waits = self.moved = self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given, made = tensors((args, kwargs)), tensors(result)
        name, returns = function._schema.name.split("::")[1], function._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not view and name not in ("detach", "lift_fresh"):
            self.operators += 1
            self.waits += name in WAITS or (
                name.startswith("index") and any(x.dtype == torch.bool for x in given)
            )
            self._move(function, args, kwargs or {}, made, name)
        known = {x.untyped_storage()._cdata for x in given}
        for x in made:
            self._keep(x.untyped_storage(), known)
        return result

    def _move(self, function, args: tuple, kwargs: dict, made: list[torch.Tensor], name: str) -> None:
        if name.startswith("empty"):
            return
        for position, argument in enumerate(function._schema.arguments):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            size = sum(x.nbytes for x in tensors(given))
            written = argument.alias_info is not None and argument.alias_info.is_write
            # `out=` operands are overwritten unread, everything else that is written in place is read first.
            read = not (written and (argument.is_out or (position == 0 and name in WRITE_ONLY)))
            self.moved += size * (written + read)
        if not any(r.alias_info is not None for r in function._schema.returns):
            self.moved += sum(x.nbytes for x in made)

    def _keep(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in known or identity in self._alive:
            return
        self._alive.add(identity)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, identity, size)

    def _let_go(self, identity: int, size: int) -> None:
        self._alive.discard(identity)
        self.now -= size


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def interleaved(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of this process per call, by contender: after one unmeasured call, each once a round.

    The order turns by one each round, so that nobody always runs behind the same neighbour.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for call in contenders.values():
        call()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            contenders[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The spread of above / below, taken round by round."""
    return spread([a / b for a, b in zip(above, below)])


def resident_growth(work: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory rose at most during `work`, by the system's own count.

    Ask in a fresh process: memory that was freed before and kept by the allocator would be used unseen.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        import resource  # other systems keep a high-water mark only, in bytes on macOS

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    reset.write_text("5")  # the high-water mark falls to what is resident now
    before = _kib(status, "VmRSS")
    work()
    return 1024 * (_kib(status, "VmHWM") - before)


def _kib(status: Path, field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", status.read_text())[1])


def target(what: str, measured: Mapping[str, float], limit: float, *, at_least: bool) -> dict[str, Any]:
    """A figure beside what was asked for; met by its median."""
    met = measured["median"] >= limit if at_least else measured["median"] <= limit
    return {"what": what, "measured": dict(measured), "limit": limit, "at_least": at_least, "met": met}


def told(figure: Mapping[str, float], digits: int = 3) -> str:
    """`median (min-max)` with that many significant digits."""

    def short(value: float) -> str:
        text = f"{value:.{digits}g}"
        return f"{value:.0f}" if "e" in text else text

    return f"{short(figure['median'])} ({short(figure['min'])}-{short(figure['max'])})"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """First column to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
    print(flush=True)


def print_targets(targets: Sequence[Mapping[str, Any]]) -> None:
    """One line each: met or MISSED, by how much, and what was asked."""
    for each in targets:
        verdict = "met   " if each["met"] else "MISSED"
        bound = "at least" if each["at_least"] else "at most"
        print(f"{verdict}  {each['what']}: {told(each['measured'])}, asked {bound} {each['limit']:g}")
    print(flush=True)


def environment() -> dict[str, Any]:
    """Where and with what a measurement was taken, and how busy the machine was before it."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    packages = ("torch", "torchvision", "timm", "nvidia-dali-cuda120", "nvidia-dali-cuda130")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {
            name: found
            for name in (*packages, "pytorch-metric-learning", "lightly", "numpy", "pillow")
            if (found := _version(name))
        },
        "command": " ".join(["python", *sys.argv]),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with a plus where files differ from it; None outside a checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """The report as indented JSON; nothing where no path is given."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def end(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what `main` returns; a wrong folder, key or device is told in a line, with its code."""
    try:
        code = main()
    except (FastSuncetError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
