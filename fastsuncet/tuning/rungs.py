"""The contenders of `fastsuncet tune`, the most promising first. What is written in the config is never tried."""

from collections.abc import Iterator

import torch

from fastsuncet.config import Config, ConfigErrors, flat
from fastsuncet.distributed.ddp import require_compiler
from fastsuncet.errors import ConfigError
from fastsuncet.tuning.chooser import Rung
from pipelines.backend import MOST, cores_of_process, decode_threads


def candidates(asked: Config, config: Config, device: str) -> list[Rung]:
    """Return the rungs on "cuda" or "cpu" for a config as `asked`, which runs as `config`."""
    rungs = (_gpu if device == "cuda" else _cpu)(config)
    return [rung for rung in rungs if _is_open(asked, config, rung)]


def _is_open(asked: Config, config: Config, rung: Rung) -> bool:
    """Return whether a rung changes the config, and nothing in it that was written."""
    now = flat(config.canonical())
    changed = [key for key, value in rung.values.items() if now[key] != value]
    try:
        config.with_values(rung.values)
        if "meta.compile" in rung.values:
            require_compiler()
    except (ConfigErrors, ConfigError):
        return False
    return bool(changed) and not any(asked.is_written(key) for key in changed)


def _gpu(config: Config) -> Iterator[Rung]:
    yield Rung("CUDA graph", {"meta.cuda_graph": True}, exact=True)
    yield Rung("compile", {"meta.compile": True, "model.fused_batchnorm": False})
    both = config.criterion.instance != "none" and config.criterion.supervised_epochs != 0
    yield from _loader(config, read_ahead=4, streams=1 + both)
    # Its pixels are near those of the other decoder, not equal.
    yield Rung("hardware JPEG decoder", {"data.hw_decoder_share": 1.0}, clock="loop")


def _cpu(config: Config) -> Iterator[Rung]:
    for count in _around(config.meta.threads or torch.get_num_threads()):
        yield Rung(f"torch threads: {count}", {"meta.threads": count}, clock="loop")
    yield from _loader(config, read_ahead=3)
    yield Rung("compile", {"meta.compile": True})


def _loader(config: Config, read_ahead: int, streams: int = 1) -> Iterator[Rung]:
    for count in _around(decode_threads(config.data.decode_threads, streams=streams)):
        yield Rung(f"decode threads: {count}", {"data.decode_threads": count}, clock="loop", exact=True)
    yield Rung(f"read-ahead: {read_ahead}", {"data.prefetch": read_ahead}, clock="loop", exact=True)


def _around(now: int) -> list[int]:
    """Return other numbers of threads than `now`, up to one more than this process's share of the cores."""
    share = max(1, cores_of_process())
    most = min(share + 1, 2 * MOST)
    tried = dict.fromkeys((share, most, share // 2, 1))
    return [count for count in tried if 1 <= count <= most and count != now]
