"""Refuse ranks that were not started alike: each would train its own network, and no collective would notice.

A config or a list of labels that was copied to the machines' own disks is the ordinary case on a cluster.
"""

import socket
from collections.abc import Mapping
from typing import Any

from fastsuncet.distributed.collectives import gather_json
from fastsuncet.errors import ConfigError
from pipelines.data_errors import DataError


def require_same(values: Mapping[str, Any], kind: type[ConfigError] | type[DataError]) -> None:
    """Raise an error of `kind` on every rank, which names the first of `values` that differs, with its ranks and hosts.

    Collective. The values are of JSON's types, under names for the user.
    """
    (host, ours), *others = gather_json([socket.gethostname(), values])
    for rank, (there, theirs) in enumerate(others, 1):
        different = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if different:
            key, more = different[0], f" ({len(different) - 1} more differ)" if different[1:] else ""
            raise kind(
                f"the ranks were not started alike. {key}{more}:\n"
                f"  {shown(ours.get(key))} on rank 0, host {host}\n"
                f"  {shown(theirs.get(key))} on rank {rank}, host {there}\n"
                "Start every rank with the same command, config, lists, program and versions"
            )


def shown(value: Any) -> str:
    """Return a value as a message has it, a digest cut short."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 60 else repr(value)
