"""The container and cluster files: no engine and no cluster is at hand, so they are read, and their shell is run."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SBATCH = ROOT / "tools" / "cluster" / "train.sbatch"
INSTALL = ROOT / "tools" / "docker_install.sh"


def command(folder: Path, name: str, body: str) -> None:
    """A stand-in for a program: writes its arguments to calls.txt, then runs `body`."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls.txt"\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def calls(folder: Path) -> list[str]:
    path = folder / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("code", "requeued"),
    [(0, False), (75, True), (2, False), (3, False), (4, False), (5, False), (137, False)],
)
def test_the_batch_job_requeues_on_75_alone_and_keeps_the_exit_code(code, requeued, tmp_path):
    command(tmp_path, "srun", f"exit {code}")
    command(tmp_path, "scontrol", "")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    arguments = ["configs/in1k_10pct.yaml", "data.root=/data/with space"]
    process = subprocess.run(
        ["bash", str(SBATCH), *arguments], env=environment, capture_output=True, text=True
    )
    assert process.returncode == code
    assert calls(tmp_path)[0].endswith("fastsuncet train configs/in1k_10pct.yaml data.root=/data/with space")
    assert ("scontrol requeue 77" in calls(tmp_path)) == requeued


def test_the_batch_job_says_how_to_use_it_when_called_without_a_config():
    process = subprocess.run(["bash", str(SBATCH)], capture_output=True, text=True)
    assert process.returncode == 2
    assert "usage: sbatch" in process.stderr


def test_the_batch_job_is_warned_before_its_time_limit_and_has_time_to_save():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", SBATCH.read_text(), re.M))
    signal, seconds = options["signal"].split("@")
    assert (
        signal == "TERM"
    )  # to the tasks (B: would reach the shell alone), and torchrun's agent passes it on
    assert "requeue" in options and options["open-mode"] == "append"
    grace = int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", SBATCH.read_text())[1])
    assert 60 <= grace < int(seconds)


def test_the_kubernetes_job_gives_up_where_a_retry_cannot_help_and_starts_again_after_75():
    job = yaml.safe_load((ROOT / "tools" / "cluster" / "job.yaml").read_text())
    rules = {
        tuple(r["onExitCodes"]["values"]): r["action"]
        for r in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in r
    }
    assert rules == {(2, 3, 4, 5): "FailJob", (75,): "Ignore"}
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a pod failure policy requires it
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] >= 120
    (container,) = pod["containers"]
    assert container["args"][0] == "train"
    assert (ROOT / container["args"][1]).exists()
    mounts, volumes = ({v["name"] for v in vs} for vs in (container["volumeMounts"], pod["volumes"]))
    assert mounts == volumes


def test_the_container_runs_the_trainer_itself_as_an_ordinary_user():
    entry = re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[1]
    assert json.loads(entry) == ["fastsuncet"]  # exec form: a shell as process 1 would swallow SIGTERM
    user = re.search(r"^USER (\S+)$", DOCKERFILE, re.M)[1]
    assert user.split(":")[0] not in ("0", "root")
    assert re.search(r"^ARG BASE_IMAGE=\S+\nFROM \$\{BASE_IMAGE\}$", DOCKERFILE, re.M)


def test_every_file_the_container_copies_exists():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] not in ignored


@pytest.mark.parametrize("script", [SBATCH, INSTALL, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_the_shell_scripts_parse(script):
    subprocess.run(
        ["bash" if "bash" in script.read_text().splitlines()[0] else "sh", "-n", str(script)], check=True
    )


@pytest.mark.parametrize("brings_torch", [False, True])
def test_the_container_pins_dali_and_leaves_an_images_own_torch_alone(brings_torch, tmp_path):
    command(tmp_path, "python3", f'case "$*" in *"import torch"*) exit {0 if brings_torch else 1};; esac')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DALI": "nvidia-dali-cuda120"}
    subprocess.run(["sh", str(INSTALL), "dependencies"], cwd=ROOT, env=environment, check=True)
    installs = [line for line in calls(tmp_path) if " install " in line]
    pinned = re.search(r"^nvidia-dali-cuda120==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert any(line.endswith(f"nvidia-dali-cuda120=={pinned}") for line in installs)
    assert any(" torch " in line for line in installs) != brings_torch


def test_apex_is_named_in_no_requirement_and_imported_by_no_module():
    # The registry's package of that name is a web toolkit: installing it runs a stranger's code.
    for name in ("pyproject.toml", "constraints.txt", "Dockerfile", "tools/docker_install.sh", "Makefile"):
        assert not re.search(r"\binstall\b.*\bapex\b|^\s*\"?apex\b", (ROOT / name).read_text(), re.M), name
    for path in [*(ROOT / "fastsuncet").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]:
        assert not re.search(r"^(import|from) apex", path.read_text(), re.M), path
