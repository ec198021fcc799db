"""Every test of a command runs in an empty folder, and as if nothing had launched it."""

import pytest


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_ARRAY_TASK_ID", "FASTSUNCET_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
