"""Time one part of this project against its peers, in turns within one run.

python tools/bench/run.py CASE [--rounds R] [--quick] [the case's own arguments]
python tools/bench/run.py CASE --help
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from tools.bench import contrast, harness, lars, peers, pixels, step

# Each module has ROUNDS (the default), `add_arguments`, and `measure`, which prints and returns the exit code.
CASES = {"pixels": pixels, "contrast": contrast, "lars": lars, "step": step, "peers": peers}


def main(arguments: list[str] | None = None) -> int:
    """Measure a case; return 1 if something computes wrong results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    for name, module in CASES.items():
        text = (module.__doc__ or "").splitlines()[0]
        added = cases.add_parser(name, help=text, description=text)
        module.add_arguments(added.add_argument)
        rounds = "turns of each contender (default: %(default)s)"
        added.add_argument("--rounds", type=int, default=module.ROUNDS, help=rounds)
        added.add_argument("--quick", action="store_true", help="little of it: for a look and for the tests")
    options = parser.parse_args(arguments)
    print(harness.machine(), end="\n\n", flush=True)
    return CASES[options.case].measure(options)


if __name__ == "__main__":
    harness.run(main)
