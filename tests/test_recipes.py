"""The recipes of CONTRIBUTING.md, followed in a copy of the code with a toy of each kind, which then runs."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.ranks import run_code

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LOSS = """
def toy(z, labels, temperature, *, keys="attached", average="sample", chunk_size=None):
    return z.square().mean() / temperature
"""
NETWORK = """class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel_size=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.fc = nn.Identity()

    def forward(self, images):
        return self.fc(self.bn1(self.conv1(images)).mean((2, 3)))


"""
NEGATIVE_TEST = """
from dataclasses import replace

import pytest
import torch

from pipelines.datasets.published import digits
from tests.support.streams import BACKENDS, SMALL, opened, unlabeled


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_plus_view_is_white(backend):
    given = [(replace(SMALL, jitter=0, negative=share),) for share in (0.0, 1.0)]
    (view,), (negative,) = (opened(unlabeled(digits(), augmentations=a), backend)(0) for a in given)
    torch.testing.assert_close(view + negative, torch.ones_like(view))
"""
COMMAND = '"""Print a toy."""\n\n\ndef run(parser, options):\n    print("a toy")\n'
TERM = '    "toy": Term("Toy", partial(contrast_labels, "toy")),\n'
DRAW = 'uniform(seed, f"{role} negative", (first_row, 0, 0, step), 4 * len(sizes))[::4]'
# What is added -> file -> (what stands there, what is written before it); "" is the end of a file, or a new one.
RECIPES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "loss": {
        "fastsuncet/losses/toy.py": [("", LOSS)],
        "fastsuncet/config/schema.py": [('"suncet", "sup_con"]', '"toy", ')],
        "fastsuncet/training/methods.py": [('    "cross_entropy": Term(', TERM)],
        "tests/support/dense_losses.py": [("", LOSS)],
    },
    "augmentation": {
        "pipelines/sampling/augmentation.py": [
            ("    mean: Mean = ", '    negative: Probability = setting(0.0, "probability of a negative")\n'),
            ("jitter=0.0, gray=0.0", "negative=0.0, "),
            ("    sigma: np.ndarray  #", "    negative: np.ndarray\n"),
            ("        gray=gray <", f"        negative={DRAW} < augmentation.negative,\n"),
        ],
        "pipelines/dali/graphs.py": [
            (
                "    # The normalization flips",
                "    if augmentation.negative:\n        image = negative(image, view)\n",
            ),
            (
                "def by_view_operator(",
                "def negative(image, view):\n    if view.negative == 1:\n"
                "        image = fn.cast(255 - image, dtype=types.UINT8)\n    return image\n\n\n",
            ),
            (
                "    if augmentation.flip:",
                "    if augmentation.negative:\n"
                '        inputs["negative"] = lambda view: view.negative.astype(np.int32)\n',
            ),
        ],
        "pipelines/torchvision_engine.py": [
            ("    return image\n", "    if view.negative[row]:\n        image = F.invert(image)\n")
        ],
        "tests/pipelines/test_negative.py": [("", NEGATIVE_TEST)],
    },
    "network": {
        "fastsuncet/config/schema.py": [('"wide_resnet28w2", "resnet_tiny"]', '"toy", ')],
        "fastsuncet/models/resnet.py": [
            ("class WideResNet(", NETWORK),
            ('"resnet_tiny": 64', '"toy": 8, '),
            ('"resnet_tiny": partial(', '"toy": Toy, '),
        ],
    },
    "sub-command": {"fastsuncet/cli/toy.py": [("", COMMAND)]},
}


@pytest.mark.parametrize("what", RECIPES)
def test_recipe_names_all_its_places_and_at_most_five(what):
    (recipe,) = re.findall(rf"^### An? {what}\n\n(.*?)\n\n", CONTRIBUTING, re.M | re.S)
    named = re.findall(r"^\d\. .*?`([\w/]+(?:/|\.py|\.txt))`", recipe, re.M)
    assert len(named) <= 5
    for file in RECIPES[what]:
        assert file in named or file[: file.rindex("/") + 1] in named, file


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Return a copy of the code with all toys."""
    folder = tmp_path_factory.mktemp("copy")
    for part in ("fastsuncet", "pipelines", "tests", "configs", "tools"):
        shutil.copytree(ROOT / part, folder / part)  # with what is compiled
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file, edits in (each for recipe in RECIPES.values() for each in recipe.items()):
        path = folder / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for before, added in edits:
            assert not before or text.count(before) == 1, (file, before)
            text = text.replace(before, added + before) if before else text + added
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_recipes_toys_run_agree_and_train(copy):
    """In one process: importing all of the copy takes seconds. Without jitter, DALI's graph is built in a third."""
    draws = "tests/pipelines/sampling/test_augmentation.py"  # its rows, also where ranks cut the batch
    tests = ("tests/training/test_methods.py", "tests/pipelines/test_negative.py", draws)
    named = "every_loss_of_the_schema or Toy and papers or negative or ranks_joined"
    toys = ["criterion.supervision=toy", "model.name=toy", "data.augmentation.negative=0.5"]
    toys += ["data.augmentation.jitter=0", "evaluation.knn_every_epochs=null"]
    toys += ["optimization.steps=2", "optimization.warmup=0", "logging.log_every=1"]
    commands = [["toy"], ["--help"], ["train", "digits_demo", *toys]]
    words = ["-q", "-p", "no:cacheprovider", *tests, "-k", named]
    code = f"import pytest; from fastsuncet import cli; assert not any(map(cli.main, {commands}))"
    exit_code, printed = run_code(f"{code}; assert not pytest.main({words})", copy, copy)
    assert exit_code == 0, printed
    assert printed.startswith("a toy\n") and "  toy         Print a toy.\n" in printed
    assert "SimCLR + Toy" in printed and "toy=" in printed
    assert re.search(r"^[.s]{5} +\[100%\]$", printed, re.M)
