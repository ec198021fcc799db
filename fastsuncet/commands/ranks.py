"""The ranks of a command: the process that a user starts becomes one of them, or starts them."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastsuncet.checkpoint import same_start
from fastsuncet.config import Config
from fastsuncet.distributed.place import Place, should_start_ranks
from fastsuncet.training.determinism import set_determinism


@contextlib.contextmanager
def as_rank(
    config: Config, arguments: Sequence[str] | None = None, status: str | os.PathLike[str] = os.devnull
) -> Iterator[Place]:
    """Join the ranks of a command, on meta.device, with torch's switches as `config` has them; yield this one's place.

    Where this process has several GPUs and no launcher has started it, `fastsuncet ARGUMENTS` is run once for each of
    them, and SystemExit is raised with the exit code of that job; None: this process is a rank in any case. `status` is
    the file that tells a saved run from a killed one after a signal (`launch.start_ranks`).

    Raises as `same_start.join` and `set_determinism`.
    """
    if arguments is not None and should_start_ranks(config.meta.device):
        from fastsuncet.distributed.launch import start_ranks

        raise SystemExit(start_ranks(list(arguments), Path(status)))
    with same_start.join(config) as place:
        set_determinism(config, place)
        yield place
