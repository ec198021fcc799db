"""The house has floors, and imports only go down: a module knows nothing of what is built on it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up; a module may import from lines below its own. `pipelines` is the cellar: it never looks up.
FLOORS = [
    "pipelines.errors",
    "pipelines.names pipelines.backend pipelines.params pipelines.color pipelines.headers",
    "pipelines.nvrtc pipelines.cache",
    "pipelines.download pipelines.cifar_batch pipelines.plugin",
    "pipelines.sampling pipelines.index pipelines.plan",
    "pipelines.index_file pipelines.datasets pipelines.resident pipelines.graphs",
    "pipelines.cifar pipelines.voc07 pipelines.splits pipelines.probe",
    "pipelines.cifar10 pipelines.cifar100",
    "pipelines.dali_engine pipelines.torchvision_twin pipelines.packed",
    "pipelines.loader pipelines.packing",
    "pipelines.check",
    # ---- the door -----------------------------------------------------------------------------------------------
    "fastsuncet.switch_off",
    "fastsuncet.errors fastsuncet.say fastsuncet.files fastsuncet.signals fastsuncet.versions fastsuncet.distributed",
    "fastsuncet.norm_operators fastsuncet.cores",
    "fastsuncet.config fastsuncet.launch fastsuncet.vote fastsuncet.energy fastsuncet.kernels",
    "fastsuncet.losses fastsuncet.optim fastsuncet.model fastsuncet.norm fastsuncet.compute fastsuncet.contents",
    "fastsuncet.communicators fastsuncet.parallel fastsuncet.learner fastsuncet.norm_kernels",
    "fastsuncet.methods",
    "fastsuncet.data_wait",
    "fastsuncet.snapshot fastsuncet.sinks fastsuncet.window fastsuncet.ledger",
    "fastsuncet.results fastsuncet.state_dicts",
    "fastsuncet.checkpoint fastsuncet.metrics fastsuncet.progress fastsuncet.data fastsuncet.images",
    "fastsuncet.supervision fastsuncet.step fastsuncet.reporter fastsuncet.state fastsuncet.summary",
    "fastsuncet.encoders",
    "fastsuncet.evaluate",
    "fastsuncet.report",
    "fastsuncet.captured",
    "fastsuncet.train fastsuncet.preview fastsuncet.doctor fastsuncet.check fastsuncet.pack",
    "fastsuncet.run",
    "fastsuncet.demo fastsuncet.evaluation fastsuncet.sweep",
    "fastsuncet.transfer fastsuncet.finetune",
    "fastsuncet.cli_help",
    "fastsuncet.cli",
    "fastsuncet.__main__",
]
LEVEL = {module: level for level, line in enumerate(FLOORS) for module in line.split()}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str:
    """The entry of FLOORS a module belongs to: itself, or the package it is part of."""
    while module not in LEVEL and "." in module:
        module = module.rpartition(".")[0]
    return module


def imports(path: Path) -> set[str]:
    """Our own modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they lead"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {
                n if (ROOT / n.replace(".", "/")).with_suffix(".py").exists() else node.module for n in names
            }
    return {name for name in found if name.split(".")[0] in ("fastsuncet", "pipelines", "tools", "tests")}


SOURCES = sorted(path for package in ("pipelines", "fastsuncet") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(path) for path in SOURCES])
def test_a_module_imports_only_from_floors_below_its_own(path):
    module = module_name(path)
    if module in ("fastsuncet", "pipelines"):
        assert imports(path) == set()
        return
    assert floor_of(module) in LEVEL, f"{module} stands on no floor: give it one in FLOORS"
    for other in imports(path):
        if floor_of(other) == floor_of(module) and "." in floor_of(module):
            continue  # within one package
        if other == "fastsuncet":
            continue  # the version
        assert LEVEL[floor_of(other)] < LEVEL[floor_of(module)], (
            f"{module} imports {other}, which is not below it"
        )


def test_pixels_know_nothing_of_learning():
    for path in (ROOT / "pipelines").rglob("*.py"):
        assert not any(name.startswith("fastsuncet") for name in imports(path)), path


def test_every_floor_names_modules_that_exist():
    names = {floor_of(module_name(path)) for path in SOURCES} - {"fastsuncet", "pipelines"}
    assert names == set(LEVEL)
