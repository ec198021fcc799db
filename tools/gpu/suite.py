"""Everything worth knowing of a bare GPU machine, unattended and inside its time, in order of worth.

    python tools/gpu/suite.py --minutes M [--device cpu|cuda] [--output PREFIX] [--small] [--only PART ...]

Each part is a process of its own with its own time-out; one that fails, hangs or kills its process takes nothing along.
PREFIX.json holds everything that was found, PREFIX.md a section for BENCHMARKS.md; both are written anew after every
part, so that a machine that goes away leaves what was done. Needs no network, and of packages torch, torchvision, timm,
PyYAML, pydantic and pytest; DALI may lie in a folder of PYTHONPATH. `--small --device cpu` rehearses it all.
Ends with 0 if every part that was started came to its end, with 2 if none could be (no GPU, no folder to
write to), else with 1.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

import torch

from tools.bench.common import environment

ROOT = Path(__file__).resolve().parents[2]
RESERVE = 10.0  # seconds kept for writing things down
TAIL = 3000  # characters of what a part that failed said last


@dataclass(frozen=True)
class Part:
    """A process to start. `module` is run with --device, --small and --json, or else `command` as it stands."""

    name: str
    limit: float  # minutes at most
    what: str
    command: tuple[str, ...] = ()

    def arguments(self, device: str, small: bool, found: Path, pictures: Path) -> list[str]:
        """The command line of this part."""
        if self.command:
            return [sys.executable, *self.command]
        sized = ["--small"] if small else []
        where = ["--json", str(found), "--pictures", str(pictures)]
        return [sys.executable, "-m", "tools.gpu.parts", self.name, "--device", device, *where, *sized]


# Named one by one: to look into all files of tests/ takes a minute, and packages that a bare machine may lack.
GPU_TESTS = (
    "tests/kernels/test_on_the_gpu.py",
    "tests/models/test_batchnorm_ops.py",
    "tests/training/test_cuda_graph.py",
    "tests/pipelines/dali/test_closeness.py",
    "tests/metrics/test_data_timer.py",
    "tests/checkpoint/test_manager.py",
    "tests/pipelines/dali/test_plugin_gpu.py",
)
# Names as they go, so that one which takes the process with it is known. Without our own addopts: they are strict, and
# a setting of pytest-timeout is an error to a pytest without it.
PYTEST = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=90")

PARTS = (
    Part("tests", 4, "the tests that need a GPU", (*PYTEST, "-m", "gpu", *GPU_TESTS)),
    Part("kernels", 2, "every kernel against its twin in torch operators"),
    Part("pixels", 3, "DALI on this device against DALI on the CPU and torchvision, strength by strength"),
    Part("resume", 3, "a run stopped and continued against one that was not, to the bit"),
    Part("precision", 3, "losses in bf16 beside fp32"),
    Part("imagenet", 5, "ResNet-50 at 224: end to end, one fixed batch, a plain step"),
    Part("cifar", 3, "ResNet-50 with the CIFAR stem at 32"),
    Part("lars", 2, "a LARS step of 27.97 M parameters"),
    Part("losses", 2, "SuNCEt and NT-Xent at 8,192 rows, forward and backward"),
    Part("norm", 3, "BatchNorm, residual and ReLU as one: torch.compile, apex, our kernels"),
    Part("loader", 4, "pictures a second by decoder share, threads and prefetch"),
    Part("ladder", 5, "one trick at a time from plain PyTorch to the whole step"),
    Part("profile", 3, "where the time of a step goes"),
    Part("race", 8, "SimCLR and SimCLR + SuNCEt to the same accuracy, in seconds"),
)


def run_part(part: Part, arguments: Sequence[str], seconds: float, found: Path) -> dict[str, Any]:
    """Starts a part and waits at most `seconds`: its status, its seconds, what it found, its last words if it failed.

    The whole process group is ended at the time-out: a part's own children would go on using the GPU.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also of children that outlived it, and when we are interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        words = said.read()
    status = "out of time" if code is None else "done" if code == 0 else f"failed ({code})"
    record = {"name": part.name, "what": part.what, "status": status}
    record["seconds"] = round(time.perf_counter() - started, 1)
    if found.exists():
        record["found"] = json.loads(found.read_text())
    if status != "done" or part.command:
        record["said"] = words[-TAIL:]
    return record


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a section for BENCHMARKS.md."""
    where = report["environment"]
    lines = [
        f"## {where['date'][:10]}, {report['card']}",
        "",
        f"{where['cpu']}, {where['cores']} cores, load {where['load']:.1f} when it began. "
        f"Commit `{where['commit'] or 'unknown'}`, Python {where['python']}, "
        + ", ".join(f"{name} {version}" for name, version in where["versions"].items())
        + f", CUDA {torch.version.cuda or 'none'}. `{published(where['command'])}`",
        "",
        'Medians, in brackets lowest and highest of the rounds. "time, x" is a time over another\'s, "speed, x" one\'s '
        "rate over another's, taken round by round but in the ladder; MB are a GPU's peak above what was held before.",
        "",
        "| part | | seconds |",
        "|---|---|---:|",
        *(f"| {p['name']}: {p['what']} | {p['status']} | {p['seconds']:g} |" for p in report["parts"]),
        "",
    ]
    for part in report["parts"]:
        for table in part.get("found", {}).get("tables", ()):
            head = table["head"]
            lines += [f"### {part['name']}: {table['title']}", "", f"| {' | '.join(head)} |"]
            lines.append("|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|")
            lines += [f"| {' | '.join(map(str, row))} |" for row in table["rows"]]
            lines.append("")
        if wrong := part.get("found", {}).get("wrong"):
            lines += [f"**Wrong in {part['name']}:** {', '.join(wrong)}.", ""]
        if last := part.get("said", "").strip().splitlines()[-8:]:
            lines += [f"{part['name']} said last:", "", "```", *last, "```", ""]
    return "\n".join(lines)


def published(command: str) -> str:
    """A command line without where this machine keeps things: a section is for others' eyes."""
    command = re.sub(r" --output(=| )\S+", "", command)
    return re.sub(r"\S*/tools/", "tools/", command)


def write(report: Mapping[str, Any], output: Path) -> None:
    """Both files, each whole or as it was."""
    for path, text in ((f"{output}.json", json.dumps(report, indent=1)), (f"{output}.md", markdown(report))):
        partial = Path(f"{path}.part")
        partial.write_text(text + "\n")
        os.replace(partial, path)


def card(device: str, small: bool) -> str:
    """The GPU and its driver in words, asked in a process of its own: CUDA, once started, would stay on the card."""
    if device == "cpu":
        return "a rehearsal on a CPU: no figure of it is a measurement"
    if small:  # the parts' names say ResNet-50 and 8,192 rows
        return f"a rehearsal with small networks: no figure of it is a measurement; {card(device, False)}"
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
        name, driver, memory, clock = cards[0].split(", ")
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return "a GPU that nvidia-smi does not tell of"
    one_of = f", one of {len(cards)}" if cards[1:] else ""
    return f"{name}{one_of}, driver {driver}, {memory}, {clock} at most"


def no_cuda() -> str | None:
    """Why a GPU cannot be used here, asked in a process of its own; None if it can."""
    ask = "import sys, torch; torch.cuda.is_available() or sys.exit('torch sees no GPU'); torch.zeros(1, device='cuda')"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    return (asked.stderr.strip().splitlines() or ["no word"])[-1] if asked.returncode else None


def suite(parts: Sequence[Part], minutes: float, device: str, small: bool, output: Path) -> dict[str, Any]:
    """Runs `parts` in order until the time is used up, writing the report after each."""
    end = time.perf_counter() + 60 * minutes - RESERVE
    report: dict[str, Any] = {
        "tool": "gpu_suite",
        "environment": environment(),
        "card": card(device, small),
        "parts": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"  # made by the first part that wants them, shared by all
        for part in parts:
            left = end - time.perf_counter()
            if left < 5:
                record = {"name": part.name, "what": part.what, "status": "left out: no time", "seconds": 0.0}
            else:
                found = Path(folder) / f"{part.name}.json"
                arguments = part.arguments(device, small, found, pictures)
                record = run_part(part, arguments, min(left, 60 * part.limit), found)
            report["parts"].append(record)
            print(f"{record['status']:<18}{record['seconds']:>7.1f} s  {part.name}: {part.what}", flush=True)
            write(report, output)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Runs the suite; 1 if a part failed or ran out of its time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu_suite"), help="PREFIX of .json and .md")
    parser.add_argument("--small", action="store_true", help="tiny networks and pictures: a rehearsal")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=[part.name for part in PARTS])
    options = parser.parse_args(arguments)
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    if not os.access(
        options.output.parent, os.W_OK | os.X_OK
    ):  # found out after the first part, it costs minutes
        print(
            f"error: {options.output.parent} is no folder that can be written: make it first", file=sys.stderr
        )
        return 2
    if options.device == "cuda" and (why := no_cuda()):
        print(
            f"error: no GPU can be used here ({why}); --device cpu --small rehearses without one",
            file=sys.stderr,
        )
        return 2
    report = suite(parts, options.minutes, options.device, options.small, options.output)
    print(f"wrote {options.output}.json and {options.output}.md")
    started = [part for part in report["parts"] if not part["status"].startswith("left out")]
    return 0 if all(part["status"] == "done" for part in started) else 1


if __name__ == "__main__":
    sys.exit(main())
