"""Test and measure on a bare GPU machine, unattended and within a given time, the most important parts first.

    python tools/gpu/suite.py --minutes M [--device cpu|cuda] [--output PREFIX] [--small] [--only PART ...]

Each part is a process with its own time limit; one that fails, hangs or kills its process does not affect the others.
PREFIX.md gets what each part printed when it has ended: a section for BENCHMARKS.md. `profile` writes its traces beside
it. So a machine that is taken away leaves what was done. `--device cpu --small` rehearses all of it.

The suite needs no network. It needs the packages of pyproject.toml and pytest; those that the machine lacks, such as
DALI and all that it imports (six too), pydantic, pydantic-core, annotated-types and typing-inspection, can lie in a
folder of PYTHONPATH; `fastsuncet doctor` says what is missing. Without DALI torchvision reads the images, and the
report says so. The view operator needs a compiler and DALI's headers, or is built elsewhere with the
same DALI: python -m pipelines.dali.view_operator --prebuilt.

Where a machine is lent for minutes, three calls, each with a PREFIX of its own: --minutes 8 --only imagenet profile
ahead start; CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment of --minutes 1.5 --only profile; --minutes 5 --only tests
lars losses. The part ladder compares as many settings as it has time for, on every GPU.

The exit code is 0 if every part that was started succeeded, 2 if none could be started (no GPU, no folder to write to),
else 1.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.distributed.signals import end_with_parent
from fastsuncet.tuning.processes import last_error, limited, run_while
from pipelines.cuda_compiler import driver_version
from tools.bench.harness import machine
from tools.gpu.workloads import CIFAR, IMAGENET, generate_images, overrides

ROOT = Path(__file__).resolve().parents[2]
RESERVE = 10.0  # seconds kept for writing the report
TAIL = 40_000  # characters of a part's output that are kept

# -v names each test as it runs, so that one which kills the process is known. Without the project's addopts: they are
# strict, and an option of pytest-timeout is an error where that is not installed.
PYTEST = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=90")


def cards() -> str:
    """Return the GPUs that torch sees and what their driver supports. Raises RuntimeError with what torch says.

    Asks another process: CUDA in this one would keep memory on the GPU.
    """
    code = (
        "from torch import cuda; cuda.init(); "
        "print(cuda.device_count(), 'x', cuda.get_device_name(), cuda.mem_get_info()[1] >> 20, 'MiB')"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if asked.returncode:
        raise RuntimeError(last_error(asked.stderr))
    return f"{asked.stdout.strip()}; driver for CUDA {driver_version()}"


class Part(NamedTuple):
    """A process to start: "python" and `words`, of which `command` replaces those in capitals."""

    name: str
    limit: float  # minutes
    what: str
    words: str


# Three turns of 15 steps: their spread is below a percent on a GPU.
STEP = "tools/bench/run.py step TOOL --rounds 3 --steps 15 "
AGAINST = f"{STEP} in1k_10pct IMAGENET --against "
FAST = "meta.cuda_graph=true meta.deterministic=false"  # likely faster than what a run has
# On a busy card each small kernel of a decoder waits for a slot, and its thread with it.
AHEAD = "data.decode_threads=16 data.prefetch=4"
PARTS = (
    Part("imagenet", 2.5, "ResNet-50 at 224 pixels, also as one graph, not deterministic", AGAINST + FAST),
    Part("profile", 2, "where the time of a step goes, fixed and end to end", "WORKLOAD profile"),
    Part("feed", 2, "the loader alone", "WORKLOAD feed"),
    Part("ahead", 2.5, "the same step with more decoding threads and read-ahead", AGAINST + AHEAD),
    Part("start", 3, "what a run does until its first updates", "WORKLOAD start"),
    Part("tests", 4, "the tests that need a GPU", "TESTS"),
    Part("ladder", 8, "what makes a run faster: fastsuncet tune", "TUNE in1k_10pct IMAGENET"),
    Part("cifar", 1.5, "ResNet-50 with the CIFAR stem at 32 pixels", STEP + "digits_demo CIFAR"),
    Part("lars", 1, "a LARS step", "tools/bench/run.py lars --rounds 9 TOOL"),
    Part("losses", 1, "SuNCEt, NT-Xent and PAWS", "tools/bench/run.py contrast --rows 1024 8192 TOOL"),
)


def command(part: Part, device: str, small: bool, folder: Path, output: Path, minutes: float) -> list[str]:
    """Return what follows "python" for a part that has so many minutes.

    `folder` holds the generated images; `output` is the prefix of what it writes beside the report.
    """
    tool = ["--device", device, *["--quick"] * small]
    files = ["--folder", str(folder), "--output", str(output)]
    minutes = min(3 if small else 7, minutes - 1)
    words = {
        "TOOL": tool,  # one that prints Markdown
        "WORKLOAD": ["-m", "tools.gpu.workloads", *tool, *files],
        "IMAGENET": overrides(IMAGENET, folder, device, small),
        "CIFAR": overrides(CIFAR, folder, device, small),
        "TUNE": ["-m", "fastsuncet", "tune", f"--minutes={minutes:.2f}", f"--output={folder}/fast.yaml"],
        "TESTS": gpu_tests(),
    }
    return [word for each in shlex.split(part.words) for word in words.get(each, [each])]


def gpu_tests() -> list[str]:
    """Return the command of the tests that need a GPU, by the files that hold them.

    Collecting all of tests/ would take a minute and import packages that a bare machine can lack.
    """
    mark = "pytest.mark" + ".gpu"  # in two parts, so that this text is not found
    paths = sorted(ROOT.glob("tests/**/test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if mark in path.read_text(encoding="utf-8")]
    return [*PYTEST, "-m", "gpu", *files]


def run_part(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run "python command" for at most `seconds`; return "done" or how it ended instead, and what it printed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # A part that outlived a suite that was killed would compute on the GPU beside the next one.
        end = partial(end_with_parent, signal.SIGKILL)
        # -u: what a part has printed is there when it is killed.
        words = [sys.executable, "-u", *command]
        code = run_while(words, output, limited(seconds), cwd=ROOT, preexec_fn=end)
        output.seek(0)
        text = output.read()[-TAIL:]
    return "out of time" if code is None else "done" if code == 0 else f"failed ({code})", text


def suite(
    parts: Sequence[Part], minutes: float, device: str, small: bool, output: Path, card: str
) -> list[str]:
    """Run `parts` in order until the time is used up; return how each ended, and add each to the report at once.

    `card` names the machine in the report.
    """
    end = time.perf_counter() + 60 * minutes - RESERVE
    path, statuses = Path(f"{output}.md"), []
    # A published command does not show where this machine keeps files.
    words = re.sub(r" --output(=| )\S+", "", " ".join(["python", *sys.argv]))
    words = re.sub(r"\S*/tools/", "tools/", words)
    rounds = "Medians; in brackets the lowest and highest of the rounds. Ratios are taken round by round."
    path.write_text(f"## {card}\n\n{machine()} `{words}`\n\n{rounds}\n\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        generate_images(Path(scratch), small)
        for part in parts:
            began = time.perf_counter()
            # The limits are for a GPU machine; a rehearsal shares a CPU with other work.
            left, status, text = end - began, "left out: no time", ""
            seconds = min(left, 60 * part.limit * (3 if small else 1))
            if left >= 5:
                prefix = Path(f"{output}_{part.name}").absolute()
                words = command(part, device, small, Path(scratch), prefix, seconds / 60)
                status, text = run_part(words, seconds)
                # Only tools, which take --device, print Markdown.
                if text and (status != "done" or "--device" not in words):
                    text = f"~~~\n{text.rstrip()}\n~~~\n"
            took = time.perf_counter() - began
            with path.open("a", encoding="utf-8") as report:
                report.write(f"### {part.name}: {part.what}\n\n{status}, {took:.1f} s\n\n{text}\n")
            print(f"{status:<18}{took:>7.1f} s  {part.name}: {part.what}", flush=True)
            statuses.append(status)
    return statuses


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return 1 if a part failed or ran out of its time."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu_suite"), help="PREFIX of .md and the traces")
    parser.add_argument("--small", action="store_true", help="small networks and pictures: a rehearsal")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=names, help=", ".join(names))
    options = parser.parse_args(arguments)
    # Found out only after the first part, it would cost minutes.
    if not os.access(options.output.parent, os.W_OK | os.X_OK):
        print(f"error: {options.output.parent} is not a writable folder: create it first", file=sys.stderr)
        return 2
    try:
        named = cards() if options.device == "cuda" else ""
    except RuntimeError as error:
        hint = "--device cpu --small runs without one"
        print(f"error: no GPU can be used here ({error}); {hint}", file=sys.stderr)
        return 2
    rehearsal = f"a rehearsal on a {options.device.upper()}: none of its figures is a measurement"
    card = rehearsal if options.small or not named else named
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    statuses = suite(parts, options.minutes, options.device, options.small, options.output, card)
    print(f"wrote {options.output}.md")
    return 0 if all(status == "done" or status.startswith("left out") for status in statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
