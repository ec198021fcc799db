"""Versions are looked up without an import."""

import sys
from importlib import metadata

from fastsuncet import versions


def test_installed_is_a_version_or_none_and_imports_nothing():
    before = set(sys.modules)
    assert versions.installed("torch").startswith("2.")
    assert versions.installed("no-such-package") is None
    versions.installed("scikit-learn"), versions.dali()
    assert not {name.split(".")[0] for name in set(sys.modules) - before} & {"sklearn", "nvidia"}


def test_dali_is_found_in_either_build(monkeypatch):
    def only_cuda130(package):
        if package == "nvidia-dali-cuda130":
            return "2.4.0"
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", only_cuda130)
    assert versions.dali() == "2.4.0"
    monkeypatch.setattr(versions, "DALI", ("no-such-package", "nor-this"))
    assert versions.dali() is None
