"""The container and cluster files are read, and their shell is run with stand-ins: no engine, no cluster is needed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from pipelines.dali.view_operator.build import PREBUILT
from tests.support.scripts import calls, run_script, stand_in

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SBATCH, SWEEP = (ROOT / "tools" / "cluster" / f"{name}.sbatch" for name in ("train", "sweep"))
INSTALL = ROOT / "tools" / "docker_install.sh"
scripts = pytest.mark.parametrize("script", [SBATCH, SWEEP], ids=lambda path: path.name)


def batch_job(script: Path, code: int, folder: Path, **task: str) -> subprocess.CompletedProcess:
    """Run a Slurm script in `folder`; its srun ends with `code`. `task` has the variables of a task of an array."""
    stand_in(folder, "srun", f"exit {code}")
    stand_in(folder, "scontrol", "")
    words = ["configs/in1k_10pct.yaml", "data.root=/data/with space"]
    return run_script(folder, "bash", script, *words, SLURM_JOB_ID="77", **task)


@pytest.mark.parametrize(
    ("code", "requeued"),
    [
        *((code, 1) for code in (75, 124, 129, 137, 138, 140, 143)),
        *((code, 0) for code in (0, 1, 2, 3, 4, 5, 139)),
    ],
)
@scripts
def test_batch_job_requeues_what_can_continue_and_keeps_the_exit_code(script, code, requeued, tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    name, job, task = ("train", "77", {}) if script == SBATCH else ("sweep", "70_3", array)
    process = batch_job(script, code, tmp_path, **task)
    assert process.returncode == code
    started, *then = calls(tmp_path)
    assert started.endswith(f"fastsuncet {name} configs/in1k_10pct.yaml data.root=/data/with space")
    assert then == [f"scontrol requeue {job}"] * requeued
    assert ("not requeued" in process.stdout) == (code != 0 and not requeued)


@scripts
def test_batch_job_gives_up_after_three_kills_in_a_row(script, tmp_path):
    """Out of memory looks like a short grace period, and would come back each time. A save on a signal resets it."""

    def requeues(code):
        before = len(calls(tmp_path))
        process = batch_job(script, code, tmp_path)
        return len(calls(tmp_path)) - before - 1, process.stdout

    assert [requeues(code)[0] for code in (137, 143)] == [1, 1]
    count, text = requeues(137)
    assert count == 0 and "killed or hung three times in a row; not requeued" in text
    assert [requeues(code)[0] for code in (137, 137, 75, 137, 137, 137)] == [1, 1, 1, 1, 1, 0]
    requeues(137)
    requeues(0)
    assert list(tmp_path.glob("*.killed")) == []


def test_batch_job_that_cannot_count_its_kills_is_not_requeued(tmp_path):
    # A folder in the file's place stops root too, unlike a folder without write permission.
    (tmp_path / "fastsuncet-77.killed").mkdir()
    assert "cannot be written to count kills" in batch_job(SBATCH, 137, tmp_path).stdout
    assert "scontrol requeue 77" not in calls(tmp_path)


def test_batch_job_waits_for_ranks_that_save_and_ends_after_a_dead_one(tmp_path):
    stand_in(tmp_path, "srun", f'echo "$SRUN_CPUS_PER_TASK" > "{tmp_path}/cores"')
    run_script(tmp_path, "bash", SBATCH, "configs/in1k_10pct.yaml", SLURM_CPUS_PER_TASK="64")
    srun = dict(re.findall(r"--([\w-]+)=(\d+)", calls(tmp_path)[0]))
    # 75 is a bad exit to Slurm: killing on it turns "saved" into 143.
    assert srun["kill-on-bad-exit"] == "0"
    grace = int(re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", SBATCH.read_text())[0])
    assert grace < int(srun["wait"]) <= 600  # longer than ranks take to exit; 0 would wait without end
    assert (tmp_path / "cores").read_text() == "64\n"  # srun does not inherit it
    for tasks, cores in ((1, "112"), (8, "64")):
        node = {"SLURM_CPUS_ON_NODE": "112", "SLURM_NTASKS_PER_NODE": str(tasks)}
        run_script(tmp_path, "bash", SBATCH, "c.yaml", SLURM_CPUS_PER_TASK="64", **node)
        assert (tmp_path / "cores").read_text() == f"{cores}\n"
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", SBATCH.read_text(), re.M))
    signal, seconds = options["signal"].split("@")
    assert signal == "TERM"  # to the tasks; B: would signal only the shell
    assert 60 <= grace < int(seconds)
    assert "requeue" in options and options["open-mode"] == "append"


def test_kubernetes_job_restarts_after_75_and_fails_after_errors():
    job = yaml.safe_load((ROOT / "tools" / "cluster" / "job.yaml").read_text())
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in rules}
    assert actions == {(2, 3, 4, 5): "FailJob", (75,): "Ignore"}
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"  # else the cache is trusted once
    (container,) = pod["containers"]
    # What was compiled outlives the pod: it is in the volume of the runs.
    assert all(each["value"].startswith("/runs/.cache") for each in container["env"])
    assert container["args"][0] == "train" and (ROOT / container["args"][1]).exists()
    mounts, volumes = ({v["name"] for v in each} for each in (container["volumeMounts"], pod["volumes"]))
    assert mounts == volumes


def test_container_runs_the_trainer_as_process_1_and_as_an_ordinary_user():
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)
    assert json.loads(entry) == ["fastsuncet"]  # exec form: a shell as process 1 would not pass SIGTERM on
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE, re.M)
    assert user.split(":")[0] not in ("0", "root")


def stages() -> dict[str, list[list[str]]]:
    """Return the instructions of each stage of the Dockerfile as lists of words; the last stage is ""."""
    found: dict[str, list[list[str]]] = {}
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M)).splitlines():
        words = line.split()
        if words and words[0] == "FROM":
            instructions = found.setdefault(words[3] if words[2:3] == ["AS"] else "", [])
        if words and (found or words[0] == "FROM"):
            instructions.append(words)
    return found


def test_container_builds_the_view_operator_in_a_stage_of_its_own_and_fails_with_it():
    by_name = stages()
    assert [(name, lines[0][1]) for name, lines in by_name.items()] == [
        ("dependencies", "${BASE_IMAGE}"),
        ("operator", "dependencies"),
        ("", "dependencies"),  # the image: no compiler in it
    ]
    assert re.search(r"^ARG BASE_IMAGE=\S+\nFROM", DOCKERFILE, re.M)
    runs = {name: [" ".join(w) for w in lines if w[0] == "RUN"] for name, lines in by_name.items()}
    assert [name for name in runs if any("g++" in line for line in runs[name])] == ["operator"]
    assert runs["operator"][-1] == "RUN python3 -m pipelines.dali.view_operator --prebuilt"
    assert not re.search(r"\|\| *(true|:)|^\s*set \+e", DOCKERFILE + INSTALL.read_text(), re.M)
    (copied,) = (words for words in by_name[""] if words[0] == "COPY" and words[1].startswith("--from"))
    kept = PREBUILT.relative_to(ROOT)
    assert copied == ["COPY", "--from=operator", f"/opt/fastsuncet/{kept}", "prebuilt"]
    # One from the machine that builds would be another compiler's.
    assert str(kept) in (ROOT / ".dockerignore").read_text().split()


def test_container_keeps_what_was_compiled_in_a_documented_volume():
    """All caches of compiled code are below it, also Inductor's, Triton's (below Inductor's) and the driver's."""
    set_ = {name: value for words in stages()[""] for name, _, value in (w.partition("=") for w in words)}
    volume = set_["XDG_CACHE_HOME"]
    for name in ("TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert set_[name].startswith(f"{volume}/"), name
    for path in (ROOT / "Dockerfile", ROOT / "docs" / "clusters.md"):
        text = path.read_text(encoding="utf-8")
        assert f'-v "$PWD/cache:{volume}"' in text and "mkdir -p runs cache\n" in text, path


def test_container_copies_what_exists():
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [words[1:-1] for lines in stages().values() for words in lines if words[0] == "COPY"]
    for source in (word for words in copied if not words[0].startswith("--from") for word in words):
        assert (ROOT / source).exists() and source.split("/")[0] not in ignored, source


# In namespaces of its own, where only shared memory can be written to. The trainer replaces the shell as process 1.
LIKE_A_CONTAINER = """
mount --make-rprivate / && mount -o remount,bind,ro / && ! touch /probe 2>/dev/null || exit 99
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && cd /dev/shm || exit 99
export HOME=/dev/shm TMPDIR=/dev/shm XDG_CACHE_HOME=/dev/shm/cache
exec setpriv --reuid 12345 --regid 12345 --clear-groups "$@"
"""


@pytest.mark.slow
def test_training_like_in_a_container_saves_as_process_1_on_sigterm():
    """Any user, a read-only root, no network, no GPU, 64 MB of shared memory; docker itself is not needed."""
    spaces = ["unshare", "-m", "-n", "-p", "-f", "--mount-proc", "sh", "-c", LIKE_A_CONTAINER, "sh"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    try:
        probe = [*spaces, sys.executable, "-c", "import fastsuncet.cli"]
        done = subprocess.run(probe, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare command here")
    if done.returncode:
        pytest.skip(f"no such namespaces, or another user cannot read the code: {done.stderr[-200:]}")
    # Without jitter, DALI's graph is built in a third of the time.
    settings = ["logging.log_every=1", "data.view_operator=false", "data.augmentation.jitter=0"]
    command = [*spaces, sys.executable, "-m", "fastsuncet", "train", "digits_demo", *settings]
    output = []
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, **both) as shell:
        for line in shell.stdout:
            output.append(line.decode())
            if b" step=3/" in line:
                (trainer,) = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
                status = Path(f"/proc/{trainer}/status").read_text()
                assert "\nUid:\t12345\t" in status and re.search(r"^NSpid:\t\d+\t1$", status, re.M)
                os.kill(int(trainer), signal.SIGTERM)
    assert shell.returncode == 75, "".join(output)
    assert "SIGTERM: saved after step" in output[-1]


@pytest.mark.parametrize("image", ["plain", "plain with DALI for CUDA 13", "own torch", "older torch"])
def test_container_pins_everything_and_keeps_an_images_own_torch(image, tmp_path):
    """The stand-in for python3 says whether torch can be imported, and keeps the constraints that pip gets.

    The image has a torch with a version like NVIDIA's, and an older NumPy.
    """
    its_torch = "2.9.1+cu128" if image == "older torch" else "2.10.0a0+b4e4ee8"
    for package, version in {"torch": its_torch, "numpy": "1.26.4"}.items():
        metadata = tmp_path / "site" / f"{package}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    stand_in(
        tmp_path,
        "python3",
        f"""case "$*" in
        *"import torch"*) exit {1 if "plain" in image else 0} ;;
        *" -c "*) while [ "$1" != -c ]; do shift; done; cp "$2" "{tmp_path}/constraints.txt" ;;
        -) PYTHONPATH="{tmp_path}/site" exec "{sys.executable}" -S - ;;
        esac""",
    )
    dali = "nvidia-dali-cuda130" if "13" in image else "nvidia-dali-cuda120"
    done = run_script(tmp_path, "sh", INSTALL, "dependencies", cwd=ROOT, DALI=dali)
    if image == "older torch":
        (bound,) = re.findall(r'"torch>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
        assert done.returncode and f"has torch {its_torch}; fastsuncet needs torch {bound} or" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    (install,) = (line for line in calls(tmp_path) if " install " in line)
    if image == "plain":
        assert install.endswith("install --require-hashes --no-deps -r tools/docker_requirements.txt")
        return
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (pin,) = (pin for pin in pins if pin.startswith("nvidia-dali-cuda120=="))
    assert install.endswith(pin.split(" ")[0].replace("nvidia-dali-cuda120", dali))
    assert "--no-deps" not in install
    assert (" torch " in install) == (image != "own torch")
    given = (tmp_path / "constraints.txt").read_text().splitlines()
    if image != "own torch":
        assert given == pins
        return
    names = [str(Requirement(line)) for line in given if not line.lstrip().startswith("#")]
    assert names[-2:] == ["torch==2.10.0a0+b4e4ee8", "numpy==1.26.4"]
    of_torch = re.compile(r"(torch(vision)?==|numpy|scipy|triton|nvidia-(?!ml-py)|cuda-|setuptools)")
    assert not [name for name in names[:-2] if of_torch.match(name)]
    for package in ("nvidia-ml-py", "timm", "huggingface-hub"):
        assert next(pin for pin in pins if pin.startswith(f"{package}==")) in given


@pytest.mark.parametrize("accepted", ["true", "false"])
def test_container_installs_the_view_operator_of_its_stage_or_fails(tmp_path, accepted):
    """It lies beside the installed package, not beside these sources, when that is asked whether it accepts it."""
    stand_in(tmp_path, "fastsuncet", "")
    stand_in(
        tmp_path,
        "python3",
        f"""case "$*" in
        *"import PREBUILT"*) echo "{tmp_path}/installed" ;;
        *view_operator*) [ "$PWD$CXX" = /false ] && [ -f "{tmp_path}/installed/view-0.so" ] && {accepted} ;;
        esac""",
    )
    (tmp_path / "prebuilt").mkdir()
    (tmp_path / "prebuilt" / "view-0.so").touch()  # COPY --from
    done = run_script(tmp_path, "sh", INSTALL, "project")
    assert (done.returncode == 0) == (accepted == "true"), done.stderr
    *_, install, folder, checked = (line for line in calls(tmp_path) if line.startswith("python3"))
    assert install.endswith(" install --no-deps --no-build-isolation .") and "import PREBUILT" in folder
    assert checked.split() == stages()["operator"][-1][1:]
    assert ("fastsuncet version" in calls(tmp_path)) == (accepted == "true")


def test_container_has_the_versions_of_the_tests_with_hashes():
    pins = {line.split()[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    packages = re.split(r"^(?=\w)", (ROOT / "tools" / "docker_requirements.txt").read_text(), flags=re.M)[1:]
    assert len(packages) > 60 and all(" \\\n    --hash=sha256:" in package for package in packages)
    assert {package.split()[0] for package in packages} <= pins


def test_apex_is_not_installed_and_only_its_kernels_are_imported():
    """The registry's package of that name is another project's: installing or importing it runs unknown code."""
    for name in ("pyproject.toml", "constraints.txt", "Dockerfile", "tools/docker_install.sh", "Makefile"):
        assert not re.search(r"\binstall\b.*\bapex\b|^\s*\"?apex\b", (ROOT / name).read_text(), re.M), name
    for path in [*(ROOT / "fastsuncet").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]:
        code = path.read_text("utf-8")
        loads = re.findall(r"^ *(?:import|from) apex|import_module\(\"(?:apex|amp_C)[^)]*", code, re.M)
        assert loads == (['import_module("amp_C"'] if path.name == "lars_kernel.py" else []), path
