"""Break the code in twelve places, one at a time and in a copy, and show the test that notices each.

    python tools/mutations.py            # all of them, a few minutes
    python tools/mutations.py fsync seed # some

Exit code 1 if a test did not notice.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    """What is broken: `old` occurs once in `file` and becomes `new`; `test` must fail then."""

    file: str
    old: str
    new: str
    test: str


RANKS = "tests/training/test_trainer.py::test_ranks_train_to_the_weights_of_one_process[2]"
SAMPLERS = "tests/pipelines/sampling/test_samplers.py"
MUTATIONS = {
    "fsync": Mutation(
        "fastsuncet/checkpoint/atomic_files.py",
        "        os.fsync(descriptor)\n    finally",
        "        pass\n    finally",
        "tests/checkpoint/test_faults.py",
    ),
    "rename": Mutation(
        "fastsuncet/checkpoint/atomic_files.py",
        "        write(temporary)\n",
        "        temporary = path\n        write(temporary)\n",
        "tests/checkpoint/test_faults.py",
    ),
    "signal handler": Mutation(
        "fastsuncet/distributed/signals.py",
        "            self.requested = signal.Signals(number).name",
        "            raise SystemExit(1)",
        "tests/distributed/test_signals.py",
    ),
    "gather": Mutation(
        "fastsuncet/distributed/collectives.py",
        "return reduce_scatter_rows(gradient, ctx.group), None",
        "return reduce_scatter_rows(gradient, ctx.group) / 2, None",
        "tests/losses/test_ranks.py",
    ),
    "seed": Mutation(
        "pipelines/sampling/samplers.py",
        "np.array([seed, role], np.uint64)",
        "np.array([0, role], np.uint64)",
        SAMPLERS,
    ),
    "barrier": Mutation(
        "fastsuncet/checkpoint/run_folder.py",
        "    value, failure = broadcast_json([value, failure])\n",
        "",
        "tests/checkpoint/test_run_folder.py",
    ),
    "checksum": Mutation(
        "fastsuncet/checkpoint/format.py",
        'if _sha256(payload) != wanted.get("sha256"):',
        "if False:",
        "tests/checkpoint/test_manager.py",
    ),
    "path check": Mutation(
        "pipelines/datasets/string_table.py",
        'return name.startswith("/") or (".." in name and ".." in name.split("/"))',
        "return False",
        "tests/pipelines/datasets/test_label_splits.py",
    ),
    "label sampler": Mutation(
        "pipelines/sampling/samplers.py",
        "return self._ordered[self._firsts[slots] + (turns * m + mine) % counts].reshape(-1)",
        "return self._ordered[self._firsts[slots] + (turns * m + 0 * mine) % counts].reshape(-1)",
        SAMPLERS,
    ),
    "DDP average": Mutation(
        "fastsuncet/distributed/ddp.py", "if place.world_size > 1:", "if place.world_size > 99:", RANKS
    ),
    "LARS exclusion": Mutation(
        "fastsuncet/optim/param_groups.py",
        'name == "bias" or isinstance(module, NORMS)',
        'name == "bias"',
        "tests/optim/test_param_groups.py",
    ),
    "color order": Mutation(
        "pipelines/torchvision_engine.py",
        "        (F.adjust_brightness, brightness, 1),\n        (F.adjust_contrast, contrast, 1),\n",
        "        (F.adjust_contrast, contrast, 1),\n        (F.adjust_brightness, brightness, 1),\n",
        "tests/pipelines/test_torchvision_engine.py",
    ),
}


def noticed(copy: Path, mutation: Mutation) -> str | None:
    """Return the name of the test that fails with `mutation` in `copy`, None if none does. Undoes the mutation."""
    path = copy / mutation.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutation.old, mutation.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutation.test]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    path.write_text(sound, encoding="utf-8")
    failed = re.search(r"^FAILED ([^\s\[]+)", done.stdout, re.M)
    return failed[1] if failed and done.returncode == 1 else None


def main() -> int:
    """Run the mutations that the command line names, or all."""
    parser = argparse.ArgumentParser(description="break the code and see the tests notice")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MUTATIONS)}")
    names = parser.parse_args().names or list(MUTATIONS)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        for part in ("fastsuncet", "pipelines", "tests", "configs", "tools", "pyproject.toml"):
            whole = ROOT / part
            shutil.copytree(whole, copy / part) if whole.is_dir() else shutil.copy(whole, copy / part)
        for name in names:
            test = noticed(copy, MUTATIONS[name])
            missed += test is None
            print(f"{name:<15} {test or f'NOT NOTICED by {MUTATIONS[name].test}'}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
