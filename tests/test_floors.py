"""Imports only go down: a folder knows nothing of the folders that are built on it."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# From the ground up. A module imports from its own folder and from the rows below it.
FLOORS = [
    "pipelines.data_errors pipelines.output pipelines.atomic_files",
    "pipelines.code_cache",
    "pipelines.cuda_compiler",
    "pipelines.backend pipelines.datasets",
    "pipelines.sampling",
    "pipelines.dali",
    "pipelines",  # the other modules at its top: the loader and the tools that find bad files
    # ---- pixels end here, learning begins ----
    "fastsuncet.errors fastsuncet.paths fastsuncet.versions",
    "fastsuncet.config fastsuncet.distributed fastsuncet.kernels",
    "fastsuncet.losses fastsuncet.optim fastsuncet.models fastsuncet.checkpoint",
    "fastsuncet.metrics fastsuncet.data",
    "fastsuncet.training",
    "fastsuncet.evaluation",
    "fastsuncet.tuning",
    "fastsuncet.commands",
    "fastsuncet",  # cli/ and __main__.py
]
FLOOR = {name: level for level, row in enumerate(FLOORS) for name in row.split()}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """Return the entry of FLOORS that holds `module`."""
    two = ".".join(module.split(".")[:2])
    return two if two in FLOOR else two.split(".")[0]


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the modules of this project that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use an absolute import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("fastsuncet", "pipelines", "tools", "tests")}


FILES = [*(ROOT / "pipelines").rglob("*.py"), *(ROOT / "fastsuncet").rglob("*.py")]
SOURCES = {module_name(path): path for path in FILES}


def test_imports_go_down():
    wrong = []
    for module, path in SOURCES.items():
        if module == "fastsuncet":  # its names are imported on first use: tests/commands/test_train.py
            continue
        here = folder_of(module)
        for other in imports(path):
            there = folder_of(other)
            if FLOOR[there] > FLOOR[here] or (FLOOR[there] == FLOOR[here] and there != here):
                wrong.append(f"{module} imports {other}, which is not below it")
    assert wrong == []
    assert imports(SOURCES["pipelines"]) == set()


def test_imports_of_modules_have_no_circle():
    """Imports within a function count: what they hide from Python they do not hide from a reader."""
    above = {
        module: {name if name in SOURCES else name.rpartition(".")[0] for name in imports(path)} - {module}
        for module, path in SOURCES.items()
    }
    TopologicalSorter(above).prepare()  # raises CycleError with the modules of a circle


def test_imports_every_row_names_a_folder_that_exists():
    assert {folder_of(module) for module in SOURCES} == set(FLOOR)


def test_no_test_module_imports_another():
    """What several need is in `tests.support`, and `tools` needs nothing of the tests."""
    for folder, wrong in (
        ("tests", r"^\s*from tests\.(\w+\.)*test_"),
        ("tools", r"^\s*(from|import) tests\b"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(wrong, path.read_text(encoding="utf-8"), re.M), path
