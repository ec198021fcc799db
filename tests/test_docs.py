"""The README and the guides are true: their commands parse, and their configs, links, files and exit codes exist.

The generated pages of the site hold everything, and links lead to pages of the site.
"""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from fastsuncet import cli
from fastsuncet.cli._parser import EXIT_CODES, Parser
from fastsuncet.config.schema import CONFIG
from tools import docs_site

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def commands(page: Path) -> list[str]:
    """Return the lines of the page's ```bash blocks, with continued lines joined and comments removed."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


HELP = [line.strip().split("    ")[0] for line in Parser("train").epilog.splitlines()]
LINES = {line for lines in (HELP, *map(commands, PAGES)) for line in lines}
TRAIN = sorted(line for line in LINES if "fastsuncet train" in line)


@pytest.mark.parametrize("command", TRAIN)
def test_docs_train_command_is_a_valid_config(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (mine,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.S)
    for name in ("mine.yaml", "again.yaml", "my.yaml"):
        Path(name).write_text(mine)
    words = shlex.split(command.replace("$PWD", "/here"))
    Parser("train").parse(words[words.index("train") + 1 :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_local_links_files_tests_and_make_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:fastsuncet|pipelines|tests|configs|tools)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in TESTS, name
    for target in re.findall(r"^make ([\w-]+)", text, re.M):
        assert re.search(rf"^{target}:", MAKEFILE, re.M), target


def test_picture_of_the_road_names_files_that_exist():
    """In a panel of the picture, names are below the panel's folder."""
    text, names = (ROOT / "docs" / "road.svg").read_text(encoding="utf-8"), []
    folder = ""
    for kind, name in re.findall(r'class="(lane|file)"[^>]*>([^<]+)<', text):
        folder = name if kind == "lane" else folder
        names += [folder + name] if kind == "file" else []
    assert 20 <= len(names) == len(set(names)) <= 25
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_readme_tree_names_every_folder():
    tree = README.split("## Where things are")[1].split("```")[1]
    named = set(re.findall(r"(\w+)/", tree))
    folders = {p.parent for package in ("fastsuncet", "pipelines") for p in (ROOT / package).glob("*/*.py")}
    assert {folder.name for folder in folders} - named == set()


def test_docs_list_every_exit_code_of_the_help():
    rows = {code.strip() for row in re.findall(r"^\| ([\d, ]+) \|", TROUBLE, re.M) for code in row.split(",")}
    codes = re.findall(r"^  (\d+) ", EXIT_CODES, re.M)
    assert len(codes) >= 8 and set(codes) <= rows


def test_docs_quote_messages_as_the_source_has_them():
    """Each message of the page is one text of the source, with names and numbers in place of "…"."""
    texts = set()
    for path in [*ROOT.glob("fastsuncet/**/*.py"), *ROOT.glob("pipelines/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                values = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
                texts.add("".join(values))

    quoted = re.findall(r"  \*\*`(.+?)`\*\*", TROUBLE.replace("\n", " "))
    assert len(quoted) >= 30
    for message in quoted:
        pattern = re.compile(".*".join(map(re.escape, message.strip("…").split("…"))), re.S)
        assert any(map(pattern.search, texts)), message


@pytest.mark.slow
def test_docs_notebook_runs(tmp_path, monkeypatch):
    """With 4 updates instead of 160, which changes only its numbers and pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    text = (ROOT / "docs" / "notebooks" / "first_run.ipynb").read_text(encoding="utf-8")
    names: dict = {}
    fewer = r'steps=4", "optimization.warmup=0", "logging.log_every=1'.replace('"', r"\"")
    for cell in json.loads(text.replace("steps=160", fewer))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["features"].shape == (500, 64) and len(names["steps"]) == 4


def test_nobody_is_told_to_install_fastsuncet_from_the_registry():
    """The registry's package of this name is not this project."""
    sources = [path for part in ("fastsuncet", "pipelines", "tools") for path in (ROOT / part).rglob("*.py")]
    for path in [*PAGES, *sources, *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install[^.\n]*\bfastsuncet\b|fastsuncet\[", text), path


def test_config_page_has_every_key_that_can_be_written_with_its_default():
    page = docs_site.config_page()
    written = {key for key, field in CONFIG.values.items() if not field.exclude}
    assert {key for key in CONFIG.values if f'<span id="{key}">' in page} == written
    (row,) = [line for line in page.splitlines() if 'id="optimization.weight_decay"' in line]
    assert row.endswith("| `1.0e-06` | a number, 0 or more and up to 1,000,000,000 |")


def test_commands_page_has_the_help_of_every_command():
    page = docs_site.commands_page()
    assert all(f"## fastsuncet {name}\n\n```text\nusage: fastsuncet {name}" in page for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("README.md", "[a](docs/data.md#examples)", "[a](data.md#examples)"),
        ("README.md", "![a](docs/demo/curves.png)", "![a](demo/curves.png)"),
        ("README.md", "[![a](docs/demo/curves.png)](RESULTS.md)", "[![a](demo/curves.png)](results.md)"),
        ("README.md", "[RESULTS.md](RESULTS.md)", "[Results](results.md)"),
        ("README.md", "[a](docs/notebooks/first_run.ipynb)", "[a](notebooks/first_run.md)"),
        ("README.md", "[a](configs/in1k_simclr.yaml)", "[a](source/configs/in1k_simclr.yaml.md)"),
        ("docs/data.md", "[a](../configs/in1k_simclr.yaml)", "[a](source/configs/in1k_simclr.yaml.md)"),
        ("docs/notebooks/first_run.ipynb", "[a](../data.md)", "[a](../data.md)"),
        ("RESULTS.md", "numbers: [docs/demo](docs/demo).", "numbers: docs/demo."),
        ("README.md", "[a](https://a.b/c.md)", "[a](https://a.b/c.md)"),
        ("README.md", "[b](missing.md) x[0](y)", "[b](missing.md) x[0](y)"),
    ],
)
def test_relink_leads_to_the_page_of_the_site(page, link, expected):
    assert docs_site.relink(link, page) == expected


def test_sources_has_a_page_for_each_linked_file():
    pages = docs_site.sources()
    assert "````yaml\n# ImageNet" in pages["source/configs/in1k_10pct.yaml.md"]
    assert "source/fastsuncet/training/step.py.md" in pages
