"""The ranks of a command: the process that a user starts becomes one of them, or starts them."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastsuncet.checkpoint.run_folder import RunStatus, require_same
from fastsuncet.config import Config, flat
from fastsuncet.config.reader import INPUTS
from fastsuncet.distributed.place import Place, join, should_start_ranks
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import ConfigError, Preempted
from fastsuncet.training.determinism import resolve_precision, set_determinism
from fastsuncet.versions import digest_of_sources, versions
from pipelines import atomic_files


@contextlib.contextmanager
def as_rank(
    config: Config, arguments: Sequence[str] | None = None, status: str | os.PathLike[str] = os.devnull
) -> Iterator[Place]:
    """Join the ranks of a command, on meta.device, with torch's switches as `config` has them; yield this one's place.

    Where this process has several GPUs and no launcher has started it, `fastsuncet ARGUMENTS` is run once for each of
    them, and SystemExit is raised with the exit code of that job; None: this process is a rank in any case. `status` is
    the file that tells a saved run from a killed one after a signal (`launch.start_ranks`).

    Raises as `join`, and ConfigError on every rank for different configs, versions or sources.
    """
    if arguments is not None and should_start_ranks(config.meta.device):
        from fastsuncet.distributed.launch import start_ranks

        raise SystemExit(start_ranks(list(arguments), Path(status)))
    with join(config.meta.device, config.meta.timeout) as place:
        if place.world_size > 1:
            # Inputs can lie on the machines' own disks: what they hold is compared, or only rank 0 reads it.
            values = {key: value for key, value in flat(config.canonical()).items() if key not in INPUTS}
            values |= {f"version of {name}": version for name, version in versions().items()}
            values["digest of fastsuncet's sources"] = digest_of_sources()
            require_same(values, ConfigError)
        set_determinism(config, place)
        yield place


@contextlib.contextmanager
def as_stoppable_rank(
    config: Config, arguments: Sequence[str], status: Path
) -> Iterator[tuple[Config, Place, SignalFlag]]:
    """Join the ranks as `as_rank`; yield the config with its precision, this rank's place, and the signals it gets.

    From a rank that was stopped, the process that started it gets an exit code and no reason: that is in `status`.
    """
    with as_rank(config, arguments, status) as place, SignalFlag() as signals:
        if place.first:
            atomic_files.remove(status)
        try:
            yield resolve_precision(config, place.device)[0], place, signals
        except Preempted as stop:
            RunStatus(status, place).write("preempted", None, str(stop))
            raise
