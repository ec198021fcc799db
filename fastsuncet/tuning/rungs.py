"""The contenders of a config on a device, the most promising first. What is written in the config is never tried."""

from collections.abc import Iterable, Iterator

import torch
from torch.torch_version import TorchVersion

from fastsuncet.config import Config, ConfigErrors, flat
from fastsuncet.data.cpu_count import MOST, cores, decode_threads, processes_here
from fastsuncet.distributed.ddp import require_compiler
from fastsuncet.errors import ConfigError
from fastsuncet.training.determinism import native_precision
from fastsuncet.tuning.chooser import Rung
from pipelines.dali.plugin.build import kept, unavailable

# Since this version a capture that fails gives its memory back (pytorch#190348, in main from 20 July 2026: after the
# branch of 2.13 and before that of 2.14). Before it, a run that lost its graph would miss the memory of a whole step.
FREES_FAILED_CAPTURES = "2.14"


def candidates(config: Config, device: str, *, everything: bool = False) -> list[Rung]:
    """Return the rungs for `config` on "cuda" or "cpu"; with `everything` also those that no run tries itself."""
    rungs = (_gpu if device == "cuda" else _cpu)(config, everything)
    return [rung for rung in rungs if _is_open(config, rung)]


def _is_open(config: Config, rung: Rung) -> bool:
    """Return whether a rung changes the config, and nothing in it that was written."""
    now = flat(config.canonical())
    changed = [key for key, value in rung.values.items() if now[key] != value]
    try:
        config.with_values(rung.values)
    except ConfigErrors:
        return False
    return bool(changed) and not any(config.is_written(key) for key in changed)


def _gpu(config: Config, everything: bool) -> Iterator[Rung]:
    yield Rung("fused BatchNorm", {"model.fused_batchnorm": True})
    frees = TorchVersion(torch.__version__) >= FREES_FAILED_CAPTURES
    if frees or everything:
        yield Rung("CUDA graph", {"meta.cuda_graph": True}, exact=True, adopted=frees)
    if kept() or unavailable() is None:
        yield Rung("pixels in one operator", {"data.color_operator": "plugin"}, clock="loop")
    if _has_compiler():
        compiled = {"meta.compile": True, "model.fused_batchnorm": False}
        yield Rung("compile", compiled)
        if everything:
            free = {**compiled, "meta.cuda_graph": True, "meta.deterministic": False}
            yield Rung("compile, graph, not deterministic", free, adopted=False)
    yield Rung("not deterministic", {"meta.deterministic": False}, adopted=False)
    # It times algorithms anew after a restart, so a resumed run could have other bits.
    yield Rung("autotune", {"meta.autotune": True}, adopted=False)
    # Two decoders share a batch, so its pixels can differ with an image's neighbors: only a person chooses that.
    for share in (1.0, 0.9, 0.8, 0.65, 0.5, 0.25) if everything else (1.0,):
        values = {"data.hw_decoder_share": share}
        yield Rung(f"hardware JPEG decoder: {share:g}", values, clock="loop", adopted=False)
    both = config.criterion.instance != "none" and config.criterion.supervised_epochs != 0
    yield from _loader(config, everything, (4,), streams=1 + both)
    if everything:
        values = {"data.decoder_buffers": "largest"}
        yield Rung("largest decoder buffers", values, clock="loop", exact=True, adopted=False)


def _cpu(config: Config, everything: bool) -> Iterator[Rung]:
    if config.meta.precision == "auto":
        native, _ = native_precision(torch.device("cpu"))
        other = "bf16" if native == "fp32" else "fp32"
        yield Rung(f"{other} in place of {native}", {"meta.precision": other})
    now = config.meta.threads or torch.get_num_threads()
    for count in _around(now, everything):
        yield Rung(f"torch threads: {count}", {"meta.threads": count}, clock="loop")
    yield from _loader(config, everything, (3,))
    if kept() or unavailable() is None:
        values = {"data.color_operator": "graph"}
        yield Rung("pixels by DALI's operators", values, clock="loop", exact=True)
    if _has_compiler():
        yield Rung("compile", {"meta.compile": True})


def _loader(config: Config, everything: bool, prefetch: Iterable[int], streams: int = 1) -> Iterator[Rung]:
    for count in _around(decode_threads(config.data.decode_threads, streams=streams), everything):
        values = {"data.decode_threads": count}
        yield Rung(f"decode threads: {count}", values, clock="loop", exact=True)
    for count in (1, 3, 4, 5) if everything else prefetch:
        yield Rung(f"read-ahead: {count}", {"data.prefetch": count}, clock="loop", exact=True)


def _around(now: int, everything: bool) -> list[int]:
    """Return other numbers of threads than `now`, up to one more than this process's share of the cores."""
    share = max(1, cores() // processes_here())
    most = min(share + 1, 2 * MOST)
    tried = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if everything else (share, most, share // 2, 1)
    return [count for count in dict.fromkeys(tried) if 1 <= count <= most and count != now]


def _has_compiler() -> bool:
    try:
        require_compiler()
    except ConfigError:
        return False
    return True
