"""`python -m pipelines.plugin`: builds the colour operator for this machine, once."""

import sys
import time

from pipelines.errors import DataError
from pipelines.plugin import build


def main() -> int:
    """0: it is there, and agrees with DALI; 1: it is not, with the reason."""
    if (there := build.kept()) is not None:
        print(f"the color operator is there already: {there}")
        return 0
    start = time.perf_counter()
    try:
        if (reason := build.unavailable()) is not None:
            raise DataError(f"the color operator cannot be built here: {reason}")
        from pipelines.plugin.prove import prove  # imports DALI

        made = build.build(prove)
    except DataError as error:
        print(
            f"{error}\nNothing is lost but time: DALI's own operators make the same pixels.", file=sys.stderr
        )
        return 1
    print(
        f"built in {time.perf_counter() - start:.0f} s, and equal to DALI's own operators to the bit: {made}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
