"""Look up the installed version of a package without importing it: importing DALI alone takes a second."""

from importlib import metadata

DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")  # two builds of one Python package: one is installed


def installed(package: str) -> str | None:
    """Return the version of the package of that distribution name, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dali() -> str | None:
    """Return the version of DALI, of either build, None if it is not installed."""
    return installed(DALI[0]) or installed(DALI[1])


def drawing_problem() -> str:
    """Return the sentence on what to install for pictures, "" where matplotlib is installed."""
    return "" if installed("matplotlib") else "pictures need matplotlib: pip install matplotlib"
