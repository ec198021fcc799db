"""Build the view operator for this machine: `python -m pipelines.dali.view_operator [--prebuilt]`."""

import argparse
import sys
import time

from pipelines.dali.view_operator.build import PREBUILT, kept
from pipelines.dali.view_operator.use import built
from pipelines.data_errors import DataError


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when the operator is built and agrees with DALI, and 1, with the reason on stderr, otherwise."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.dali.view_operator", description=__doc__)
    parser.add_argument("--prebuilt", action="store_true", help=f"keep it for all users, in {PREBUILT}")
    prebuilt = parser.parse_args(arguments).prebuilt
    try:
        if (path := kept(prebuilt=prebuilt)) is not None:
            print(f"The view operator was built before: {path}")
            return 0
        start = time.perf_counter()
        path = built(prebuilt=prebuilt)
    except DataError as error:
        print(f"{error}\nRuns go without it, slower.", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    print(f"Built in {seconds:.0f} s, equal to DALI's CPU operators to the bit: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
