"""The README is true: its map names every file, its commands parse, its configs and links exist."""

import re
import shlex
from pathlib import Path

import pytest

from fastsuncet.commands.help import EXIT_CODES
from fastsuncet.config import load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_map_names_every_module_of_both_packages_and_no_other():
    tree = README.split("## Map")[1].split("```")[1]
    named = set(re.findall(r"\b(\w+\.py)\b", tree))
    files = [p for package in ("pipelines", "fastsuncet", "tools") for p in (ROOT / package).rglob("*.py")]
    modules = {path.name for path in files if not path.name.startswith("__")}
    assert modules - named == set(), "not on the map"
    assert named - modules == set(), "on the map, but not there"


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


@pytest.mark.parametrize("command", [c for c in commands() if "fastsuncet train" in c])
def test_every_train_command_names_a_valid_config(command):
    words = shlex.split(command.replace("$PWD", "/here"))
    arguments = words[words.index("train") + 1 :]
    load_config(ROOT / arguments[0], [word for word in arguments[1:] if not word.startswith("--")])


def test_every_local_link_leads_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_exit_code_of_the_help_is_in_the_readme():
    rows = {code.strip() for row in re.findall(r"^\| ([\d, ]+) \|", README, re.M) for code in row.split(",")}
    codes = re.findall(r"^  (\d+) ", EXIT_CODES, re.M)
    assert len(codes) >= 8 and set(codes) <= rows


def test_the_two_commands_of_the_first_screen_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.split("## ")[0], re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
