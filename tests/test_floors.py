"""Imports only go down: a folder knows nothing of the folders that are built on it. And torch has what they import.

Code for a GPU does not run in these tests, so the names that it uses are looked up in this torch.
"""

import ast
import functools
import pkgutil
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
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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


PACKAGES = ("torch", "torchvision", "timm")


def names_of(source: str) -> set[str]:
    """Return the dotted names below PACKAGES that a module imports or reads: {"torch.nn", "torch.cuda.Event"}."""
    tree = ast.parse(source)
    bound, names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                names.add(each.name)
                first = each.name.split(".")[0]
                bound[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                bound[each.asname or each.name] = f"{node.module}.{each.name}"
                names.add(f"{node.module}.{each.name}")
    for node in ast.walk(tree):
        words = []
        # A name that is set can be one that only some versions have: the sources ask by `hasattr` first.
        while isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            words.insert(0, node.attr)
            node = node.value
        if words and isinstance(node, ast.Name) and node.id in bound:
            names.add(".".join([bound[node.id], *words]))
    return {name for name in names if name.split(".")[0] in PACKAGES}


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_torch_has_every_name_that_the_sources_use():
    paths = [*FILES, *(ROOT / "tools").rglob("*.py")]
    used = set().union(*(names_of(path.read_text(encoding="utf-8")) for path in paths))
    assert {"torch.cuda.CUDAGraph", "torch.cuda.get_device_properties"} < used
    # It needs a package that can be absent.
    used = {name for name in used if not name.startswith("torch.utils.tensorboard")}
    assert [name for name in sorted(used) if not exists(name)] == []
