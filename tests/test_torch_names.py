"""Code for a GPU does not run in these tests: look up the names that it uses in this torch."""

import ast
import pkgutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
    paths = [path for part in ("fastsuncet", "pipelines", "tools") for path in (ROOT / part).rglob("*.py")]
    used = set().union(*(names_of(path.read_text(encoding="utf-8")) for path in paths))
    assert {"torch.cuda.CUDAGraph", "torch.cuda.get_device_properties"} < used
    # It needs a package that can be absent.
    used = {name for name in used if not name.startswith("torch.utils.tensorboard")}
    assert [name for name in sorted(used) if not exists(name)] == []


def test_names_of_finds_what_torch_lacks():
    source = "import torch\nimport torch.nn.functional as F\nfrom torch import cuda\n"
    source += "torch._C.lost(); F.relu(1).lost; cuda.lost_too(torch.Tensor.lost); cuda.set_only = 1"
    lost = {name for name in names_of(source) if not exists(name)}
    assert lost == {"torch._C.lost", "torch.cuda.lost_too", "torch.Tensor.lost"}
