"""fastsuncet: contrastive pre-training that uses labels (SuNCEt, arXiv 2006.10803), fast and bit-for-bit resumable.

    config = fastsuncet.load_config("digits_demo", ["optimization.epochs=20"])
    run = fastsuncet.train(config)
    encoder = fastsuncet.load_encoder(run)
    files, features = fastsuncet.embed(encoder, "photos")
    predictions = fastsuncet.predict(run, "photos")

`import fastsuncet` imports nothing else: each name below is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastsuncet.commands.api import embed, init_config, load_encoder, predict, suggest, train
    from fastsuncet.config import Config, load_config
    from fastsuncet.losses.cross_entropy import cross_entropy
    from fastsuncet.losses.nt_xent import nt_xent
    from fastsuncet.losses.paws import paws
    from fastsuncet.losses.suncet import suncet
    from fastsuncet.losses.sup_con import sup_con
    from fastsuncet.losses.swav import swav
    from fastsuncet.optim import LARS, parameter_groups, warmup_cosine
    from fastsuncet.versions import __version__

__all__ = [
    "LARS",
    "Config",
    "__version__",
    "cross_entropy",
    "embed",
    "init_config",
    "load_config",
    "load_encoder",
    "nt_xent",
    "parameter_groups",
    "paws",
    "predict",
    "suggest",
    "suncet",
    "sup_con",
    "swav",
    "train",
    "warmup_cosine",
]
_MODULES = {
    "fastsuncet.commands.api": ("embed", "init_config", "load_encoder", "predict", "suggest", "train"),
    "fastsuncet.config": ("Config", "load_config"),
    **{
        f"fastsuncet.losses.{name}": (name,)
        for name in ("cross_entropy", "nt_xent", "paws", "sup_con", "suncet", "swav")
    },
    "fastsuncet.optim": ("LARS", "parameter_groups", "warmup_cosine"),
    "fastsuncet.versions": ("__version__",),
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
