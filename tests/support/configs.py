"""Small configs for tests, and files of wrong ones."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from fastsuncet.config import Config, ConfigErrors, load_config

GOOD = """\
data:
  kind: image_folder
  root: /images
criterion:
  temperature: 0.1
  unsupervised_batch_size: 256
optimization:
  epochs: 100
  lr: 1.0
"""


def load(text: str = GOOD, *overrides: str) -> Config:
    """Load `text` as run.yaml in the working directory."""
    Path("run.yaml").write_text(text)
    return load_config("run.yaml", overrides)


def refusal(text: str = GOOD, *overrides: str) -> str:
    """Return the message for a wrong config, without its first line."""
    with pytest.raises(ConfigErrors) as caught:
        load(text, *overrides)
    assert caught.value.exit_code == 2
    first, _, rest = str(caught.value).partition("\n\n")
    count = len(caught.value.problems)
    assert first == f"{count} problem{'s' * (count > 1)} in the config"
    return rest


class WrongFile(NamedTuple):
    """A case of wrong_configs.txt or wrong_sweeps.txt, whose heads explain the format."""

    text: str
    overrides: list[str]
    problems: list[tuple[str, str, str]]  # place, key, a part of the message

    def check(self, error: ConfigErrors) -> None:
        """Compare the places, the keys and parts of the messages."""
        found = [(str(p.origin), p.key.strip() or "-", p.text) for p in error.problems]
        assert [each[:2] for each in found] == [each[:2] for each in self.problems]
        for (*_, text), (*_, part) in zip(found, self.problems, strict=True):
            assert part in text


def wrong_files(path: Path) -> list:
    """Return the cases of `path` as parameters named by the cases."""
    _, *blocks = re.split(r"^\[(\w+)\]\n", path.read_text(), flags=re.M)
    parts = dict(zip(blocks[::2], blocks[1::2], strict=True))
    cases = []
    for block in re.split(r"\n(?! )", parts.pop("cases").rstrip("\n")):
        first, *problems = block.split("\n")
        name, *edits = first.split(" | ")
        sound = next((each for each in parts if name.endswith(f"({each})")), next(iter(parts)))
        text = [edit[2:] for edit in edits if edit.startswith("= ")] or parts[sound].splitlines()
        for edit in reversed([edit for edit in edits if edit[0].isdigit()]):
            number, kind, new = re.fullmatch(r"(\d+)(\+|:) ?(.*)", edit).groups()
            at = int(number)
            text[at if kind == "+" else at - 1 : at] = [new] if new else []
        overrides = [edit[2:] for edit in edits if edit.startswith("$ ")]
        expected = [re.fullmatch(r"    (.*?): ([^:|]*) \| (.*)", each).groups() for each in problems]
        case = WrongFile("".join(f"{line}\n" for line in text), overrides, expected)
        cases.append(pytest.param(case, id=name))
    assert len({case.id for case in cases}) == len(cases)
    return cases
