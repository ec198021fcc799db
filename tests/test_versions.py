"""Versions are looked up without an import."""

import sys
from importlib import metadata

from fastsuncet import versions


def test_an_installed_package_has_a_version_and_an_absent_one_is_none():
    assert versions.installed("torch").startswith("2.")
    assert versions.installed("no-such-package") is None


def test_dali_is_found_in_either_build(monkeypatch):
    def only_cuda130(package):
        if package == "nvidia-dali-cuda130":
            return "2.4.0"
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", only_cuda130)
    assert versions.dali() == "2.4.0"
    monkeypatch.setattr(versions, "DALI", ("no-such-package", "nor-this"))
    assert versions.dali() is None


def test_looking_up_a_version_imports_nothing():
    before = set(sys.modules)
    versions.installed("scikit-learn"), versions.dali()
    assert not {name.split(".")[0] for name in set(sys.modules) - before} & {"sklearn", "nvidia"}
