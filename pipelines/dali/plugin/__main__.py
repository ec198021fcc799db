"""`python -m pipelines.dali.plugin [--gpu]`: builds the colour operator for this machine, once."""

import argparse
import sys
import time
from functools import partial

from pipelines.dali.plugin import build
from pipelines.data_errors import DataError


def main(arguments: list[str] | None = None) -> int:
    """0: it is there, and agrees with DALI; 1: it is not, with the reason."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.dali.plugin", description=__doc__)
    parser.add_argument(
        "--gpu", action="store_true", help="the one for a GPU, which must be here to prove it on"
    )
    device = "gpu" if parser.parse_args(arguments).gpu else "cpu"
    if (there := build.kept(device)) is not None:
        print(f"the color operator is there already: {there}")
        return 0
    start = time.perf_counter()
    try:
        if (reason := build.unavailable(device)) is not None:
            raise DataError(f"the color operator cannot be built here: {reason}")
        from pipelines.backend import require_gpu
        from pipelines.dali.plugin.check_equal import prove  # imports DALI

        if device == "gpu":
            require_gpu()  # sooner than after a compilation
        made = build.build(partial(prove, device=device), device)
    except DataError as error:
        print(f"{error}\nNothing is lost but time: DALI's own operators do it.", file=sys.stderr)
        return 1
    print(
        f"built in {time.perf_counter() - start:.0f} s, and equal to DALI's CPU operators to the bit: {made}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
