"""fastsuncet: contrastive pre-training that uses labels (SuNCEt, arXiv 2006.10803), fast and bit-for-bit resumable.

    config = fastsuncet.load_config("digits_demo", ["optimization.epochs=20"])
    run = fastsuncet.train(config)
    encoder = fastsuncet.load_encoder(run)
    files, features = fastsuncet.embed(encoder, "photos")

`import fastsuncet` imports nothing else: each name below is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastsuncet.commands.api import embed, load_encoder, train
    from fastsuncet.config import Config, load_config
    from fastsuncet.losses import cross_entropy, nt_xent, suncet, sup_con, swav
    from fastsuncet.optim import LARS, LARSSettings, parameter_groups, warmup_cosine

__all__ = [
    "LARS",
    "Config",
    "LARSSettings",
    "cross_entropy",
    "embed",
    "load_config",
    "load_encoder",
    "nt_xent",
    "parameter_groups",
    "suncet",
    "sup_con",
    "swav",
    "train",
    "warmup_cosine",
]
_MODULES = {
    "fastsuncet.commands.api": ("embed", "load_encoder", "train"),
    "fastsuncet.config": ("Config", "load_config"),
    "fastsuncet.losses": ("cross_entropy", "nt_xent", "sup_con", "suncet", "swav"),
    "fastsuncet.optim": ("LARS", "LARSSettings", "parameter_groups", "warmup_cosine"),
}


def __getattr__(name: str) -> Any:
    """Return a public name, imported now."""
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'fastsuncet' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names too, for completion."""
    return sorted({*globals(), *__all__})
