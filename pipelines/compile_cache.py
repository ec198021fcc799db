"""Where what was compiled on this machine is kept."""

import os
from pathlib import Path


def folder(kind: str) -> Path:
    """$FASTSUNCET_CACHE/kind, else $XDG_CACHE_HOME/fastsuncet/kind, else ~/.cache/fastsuncet/kind."""
    if own := os.environ.get("FASTSUNCET_CACHE"):
        return Path(own) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastsuncet" / kind
