"""Which version of a package is installed, without importing it: DALI's import alone takes a second."""

from importlib import metadata

DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")  # two builds of one Python package: one is installed


def installed(package: str) -> str | None:
    """The version of `package`, by the name it is installed under; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dali() -> str | None:
    """The version of DALI, whichever build; None without one."""
    return installed(DALI[0]) or installed(DALI[1])
