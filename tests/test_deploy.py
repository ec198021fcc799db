"""The container and cluster files: no engine and no cluster is needed, they are read, and their shell is run."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SBATCH, SWEEP = (ROOT / "tools" / "cluster" / f"{name}.sbatch" for name in ("train", "sweep"))
INSTALL = ROOT / "tools" / "docker_install.sh"


def command(folder: Path, name: str, body: str) -> None:
    """A stand-in for a program: writes its arguments to calls.txt, then runs `body`."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls.txt"\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def calls(folder: Path) -> list[str]:
    path = folder / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def batch_job(script: Path, code: int, folder: Path) -> subprocess.CompletedProcess:
    """Runs a Slurm script in `folder` with stand-ins; its step ends with `code`. Calls are in `folder`'s calls.txt."""
    command(folder, "srun", f"exit {code}")
    command(folder, "scontrol", "")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    arguments = ["configs/in1k_10pct.yaml", "data.root=/data/with space"]
    return subprocess.run(
        ["bash", str(script), *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("code", "requeued"),
    [(0, 0), (75, 1), (143, 1), (137, 1), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (139, 0)],
)
@pytest.mark.parametrize("script", [SBATCH, SWEEP], ids=lambda path: path.name)
def test_a_batch_job_requeues_what_can_go_on_by_itself_and_keeps_the_exit_code(
    script, code, requeued, tmp_path
):
    process = batch_job(script, code, tmp_path)
    assert process.returncode == code
    asked, *then = calls(tmp_path)
    name = "train" if script == SBATCH else "sweep"
    assert asked.endswith(f"fastsuncet {name} configs/in1k_10pct.yaml data.root=/data/with space")
    assert then == ["scontrol requeue 77"] * requeued
    assert ("not requeued" in process.stdout or "submit again" in process.stdout) == (code and not requeued)


@pytest.mark.parametrize("script", [SBATCH, SWEEP], ids=lambda path: path.name)
def test_a_batch_job_that_is_killed_every_time_gives_up_and_a_save_on_a_signal_counts_anew(script, tmp_path):
    def requeues(code):
        before = len(calls(tmp_path))
        process = batch_job(script, code, tmp_path)
        return len(calls(tmp_path)) - before - 1, process.stdout

    # Out of memory looks like a grace period that was too short, and would come back for ever.
    assert [requeues(code)[0] for code in (137, 143)] == [1, 1]
    count, text = requeues(137)
    assert count == 0 and "killed three times in a row" in text and "not requeued" in text
    assert [requeues(code)[0] for code in (137, 137, 75, 137, 137, 137)] == [1, 1, 1, 1, 1, 0]
    requeues(137)
    requeues(0)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".killed")] == []


def test_a_batch_job_that_cannot_count_its_kills_is_not_requeued_for_one(tmp_path):
    (
        tmp_path / "fastsuncet-77.killed"
    ).mkdir()  # as good as a folder nobody may write, and root is stopped by it too
    assert "cannot be counted" in batch_job(SBATCH, 137, tmp_path).stdout
    assert "scontrol requeue 77" not in calls(tmp_path)


def test_tasks_that_leave_with_75_are_not_killed_and_a_dead_one_still_ends_the_job(tmp_path):
    command(tmp_path, "srun", f'echo "$SRUN_CPUS_PER_TASK" > "{tmp_path}/cores"')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "64"}
    subprocess.run(["bash", str(SBATCH), "configs/in1k_10pct.yaml"], env=environment, check=True)
    options = dict(re.findall(r"--([\w-]+)=(\d+)", calls(tmp_path)[0]))
    # 75 is a bad exit to Slurm: killing on it turns "saved" into 143, which is not requeued.
    assert options["kill-on-bad-exit"] == "0"
    grace = int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", SBATCH.read_text())[1])
    assert grace < int(options["wait"]) <= 600  # longer than ranks take to leave; 0 would wait for ever
    assert (tmp_path / "cores").read_text() == "64\n"  # srun does not inherit it


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


def test_the_containers_dependencies_stay_built_when_our_own_source_or_the_commit_changes():
    before = DOCKERFILE[: DOCKERFILE.index("docker_install.sh dependencies")]
    assert re.findall(r"^COPY (.+) \S+$", before, re.M) == ["constraints.txt", "tools/docker_install.sh"]
    assert re.findall(r"^ARG (\w+)", before, re.M) == [
        "BASE_IMAGE",
        "DALI",
    ]  # all that gives reason to fetch anew


def test_the_container_asks_the_driver_for_the_jpeg_decoder_which_docker_leaves_out_unasked():
    asked = re.search(r"NVIDIA_DRIVER_CAPABILITIES=(\S+)", DOCKERFILE)[1]
    assert {"compute", "utility", "video"} <= set(asked.split(","))


def test_every_file_the_container_copies_exists():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] not in ignored


@pytest.mark.parametrize("script", [SBATCH, SWEEP, INSTALL, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_the_shell_scripts_parse(script):
    subprocess.run(
        ["bash" if "bash" in script.read_text().splitlines()[0] else "sh", "-n", str(script)], check=True
    )


@pytest.mark.parametrize("brings_torch", [False, True])
def test_the_container_pins_dali_and_leaves_an_images_own_torch_alone(brings_torch, tmp_path):
    # A stand-in that answers whether torch imports, keeps the constraints given to pip, and runs any other program. The
    # image's records: torch with a version like NVIDIA's, and an older NumPy.
    for package, version in {"torch": "2.10.0a0+b4e4ee8", "numpy": "1.26.4"}.items():
        record = tmp_path / "site" / f"{package}-{version}.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    command(
        tmp_path,
        "python3",
        f"""case "$*" in
        *"import torch"*) exit {0 if brings_torch else 1} ;;
        *" install "*) while [ "$1" != -c ]; do shift; done; cp "$2" "{tmp_path}/constraints.txt" ;;
        -) PYTHONPATH="{tmp_path}/site" exec "{sys.executable}" -S - ;;
        esac""",
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DALI": "nvidia-dali-cuda120"}
    subprocess.run(["sh", str(INSTALL), "dependencies"], cwd=ROOT, env=environment, check=True)
    (install,) = (line for line in calls(tmp_path) if " install " in line)
    ours = (ROOT / "constraints.txt").read_text()
    pinned = re.search(r"^nvidia-dali-cuda120==(\S+)", ours, re.M)[1]
    assert install.endswith(f"nvidia-dali-cuda120=={pinned}")
    assert (" torch " in install) != brings_torch
    assert "--no-deps" not in install  # a list of dependencies written by hand is incomplete tomorrow
    given = (tmp_path / "constraints.txt").read_text()
    if not brings_torch:
        assert given == ours
        return
    lines = [str(Requirement(line)) for line in given.splitlines() if not line.startswith("#")]
    assert lines[-2:] == ["torch==2.10.0a0+b4e4ee8", "numpy==1.26.4"]
    assert not [
        x
        for x in lines[:-2]
        if re.match(r"(torch(vision)?==|numpy|scipy|triton|nvidia-(?!ml-py)|cuda-|setuptools)", x)
    ]
    # nvidia-ml-py is plain Python, and no part of what an image's torch stands on
    assert re.search(r"^nvidia-ml-py==", ours, re.M)[0] in given
    assert re.search(r"^timm==", ours, re.M)[0] in given and "huggingface-hub==" in given


def test_apex_is_named_in_no_requirement_and_imported_by_no_module():
    # The registry's package of that name is a web toolkit: installing it runs a stranger's code.
    for name in ("pyproject.toml", "constraints.txt", "Dockerfile", "tools/docker_install.sh", "Makefile"):
        assert not re.search(r"\binstall\b.*\bapex\b|^\s*\"?apex\b", (ROOT / name).read_text(), re.M), name
    for path in [*(ROOT / "fastsuncet").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]:
        assert not re.search(r"^(import|from) apex", path.read_text(), re.M), path
