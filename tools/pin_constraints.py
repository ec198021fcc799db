"""Write constraints.txt: the one exact set of versions that `make demo`, `make test` and the Dockerfile install.

    python tools/pin_constraints.py python3.10 python3.11 python3.12 python3.13 [--keep]

It asks pip (a dry run; nothing is installed) what each interpreter would get for `.[dev,bench,energy]`, and merges the
answers: a version that all agree on is one line, a version for some gets a `python_version` marker. --keep keeps the
versions that are pinned already: use it after adding a package.
"""

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = """\
# One exact set of versions for every machine; written by `python tools/pin_constraints.py`, not by hand.
# Bounds live in pyproject.toml. An interpreter a release no longer supports gets the newest release that does.
"""


def resolve(python: str, *, keep: bool) -> tuple[str, dict[str, str]]:
    """Return ("3.11", {"torch": "2.15.0", ...}), what pip would install for `.[dev,bench,energy]` there."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "-q"]
        # An old pip resolves differently, and `make` upgrades pip first too.
        subprocess.run([*pip, "install", "--upgrade", "pip"], check=True)
        report = Path(folder, "report.json")
        known = ["-c", "constraints.txt"] if keep else []
        command = [*pip, "install", "--dry-run", "--report", str(report), *known, "-e", ".[dev,bench,energy]"]
        subprocess.run(command, check=True, cwd=ROOT)
        answer = json.loads(report.read_text(encoding="utf-8"))
    version = ".".join(answer["environment"]["python_version"].split(".")[:2])
    packages = (item["metadata"] for item in answer["install"])
    # The local part (+cu132, +cpu) names a build, not a version: a constraint with it would fit one index only.
    pins = {p["name"].lower().replace("_", "-"): p["version"].split("+")[0] for p in packages}
    pins.pop("fastsuncet")
    return version, pins


def merge(answers: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of constraints.txt, with markers only where the interpreters disagree."""
    versions: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for python, pins in answers.items():
        for name, version in pins.items():
            versions[name][version].append(python)
    lines = []
    for name in sorted(versions):
        for version, pythons in sorted(versions[name].items()):
            if len(versions[name]) == 1:
                lines.append(f"{name}=={version}")
            else:
                marker = " or ".join(f'python_version == "{python}"' for python in pythons)
                lines.append(f"{name}=={version} ; {marker}")
    return lines


def main() -> None:
    """Resolve for every interpreter named, then write constraints.txt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="+", help="interpreters to resolve for, e.g. python3.10 python3.13")
    parser.add_argument("--keep", action="store_true", help="leave every version that is pinned already")
    given = parser.parse_args()
    answers = dict(resolve(python, keep=given.keep) for python in given.pythons)
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(merge(answers)) + "\n")
    print(f"constraints.txt: {len(merge(answers))} lines for Python {', '.join(answers)}")


if __name__ == "__main__":
    main()
