"""Build the color operator for this machine: `python -m pipelines.dali.plugin [--gpu]`."""

import argparse
import sys
import time
from pathlib import Path

from pipelines.backend import require_gpu
from pipelines.dali.plugin.build import build, kept
from pipelines.data_errors import DataError


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when the operator is built and agrees with DALI, and 1, with the reason on stderr, otherwise."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.dali.plugin", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="build it for the GPU of this machine")
    device = "gpu" if parser.parse_args(arguments).gpu else "cpu"

    def prove(path: Path) -> None:
        from pipelines.dali.plugin.check_equal import require_equal  # imports DALI, which can be absent

        require_equal(path, device)

    try:
        if (path := kept(device)) is not None:
            print(f"The color operator was built before: {path}")
            return 0
        start = time.perf_counter()
        if device == "gpu":
            require_gpu()  # before a compilation whose result could not be compared
        path = build(prove, device)
    except DataError as error:
        print(f"{error}\nDALI's own operators are used instead: same pixels, slower.", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    print(f"Built in {seconds:.0f} s, equal to DALI's CPU operators to the bit: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
