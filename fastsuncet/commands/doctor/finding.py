"""What an examination of `fastsuncet doctor` comes to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What an examination found: state "ok", "absent" or "problem", the facts, and what to do about them."""

    state: str
    facts: str
    advice: str = ""
