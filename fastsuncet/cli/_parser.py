"""The parser of one command, and the help that a user reads about all of them.

The help of a command is its module's docstring: a line for the list of commands, what it does, then examples and exit
codes. A command without exit codes of its own has EXIT_CODES, which the list of commands shows.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastsuncet.errors import ConfigError
from fastsuncet.paths import typed_path as path
from pipelines.output import say_line

if TYPE_CHECKING:
    from fastsuncet.config import Config

Options = argparse.Namespace  # what a command line asks for
OVERRIDE = re.compile(r"[^=/\\]*=")  # a path can hold a = after its first slash
EXIT_CODES = """\
exit codes:
  0    done
  1    a bug: please report it with its traceback
  2    the config or the command line is wrong, or a batch does not fit the GPU
  3    the data is wrong: a missing folder, an image that cannot be decoded
  4    a loss is not finite; nothing of that step was saved
  5    a checkpoint, a result or an export cannot be read or written, or the
       disk or the file server failed
  75   stopped by a signal and saved: the same command continues (requeue it)
  124  a rank hung and is named: the same command continues
  130  interrupted from the keyboard"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Fill paragraphs to the terminal's width; tables and examples, with indented lines, stay."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join(part if "\n  " in f"\n{part}" else textwrap.fill(part, width) for part in parts)


class Parser(argparse.ArgumentParser):
    """argparse for the command `name`, with errors in the form of our others, which name the nearest option.

    The command's module declares its arguments, if it has any, in `arguments(parser)`. The work is done by its
    `run(parser, options)`, which imports what is slow, or without one by the function of `fastsuncet.commands` that has
    the command's name and takes the options by theirs. A number that either returns is the exit code; all else is 0.
    """

    def __init__(self, name: str):
        self.name, self.operand, self.ranks = name, "", False
        self.module: Any = _module(name)
        text = self.module.__doc__.strip()
        above, *below = re.split(r"\n\n(?=examples:|exit codes:)", text, maxsplit=1)
        if "exit codes:" not in text:
            below.append("exit codes: `fastsuncet --help` lists them")
        super().__init__(
            prog=f"fastsuncet {name}",
            description=above,
            epilog="\n\n".join(below),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        getattr(self.module, "arguments", lambda parser: None)(self)

    # ---------------------------------------------------------------------------- arguments that several commands have
    def takes(self, name: str, metavar: str, help: str, **settings: Any) -> None:
        """Add an argument, or an option with a value."""
        self.add_argument(name, metavar=metavar, help=help, **settings)

    def flag(self, name: str, help: str, **settings: Any) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help, **settings)

    def takes_config(self, takes: str = "CONFIG", *, kind: str = "", ranks: bool = False) -> None:
        """Add a config and its overrides as the last argument; `parse` loads it if the command takes CONFIG.

        `kind` is what the argument can be besides a config. With `ranks` the options have the command line as
        `arguments`, which starts the same command on further ranks.
        """
        self.ranks = ranks
        before = "".join(f"{action.metavar} " for action in self._actions if not action.option_strings)
        self.operand, self.usage = takes, f"{self.prog} {before}{takes} [section.key=value ...] [options]"
        words = "a YAML file or the name of a shipped config, and changes to it as section.key=value"
        self.add_argument("words", nargs="*", metavar=takes, help=f"{kind}{words}")

    def takes_encoder(self, *, every: bool) -> None:
        """Add --encoder and --step, and --every-checkpoint where a command has it, which excludes --step."""
        text = "the folder of another run or of a fine-tuning, one checkpoint, or a file of weights (torchvision, "
        text += "timm, the authors' checkpoints; torch.save or .safetensors); default: the config's run"
        self.takes("--encoder", "PATH", text, type=path)
        steps = self.add_mutually_exclusive_group()
        steps.add_argument(
            "--step", metavar="N", type=whole(0), help="this checkpoint of the run (default: the newest)"
        )
        if every:
            text = "every good checkpoint of the run"
            steps.add_argument("--every-checkpoint", dest="every", action="store_true", help=text)

    def takes_run(self, kind: Callable[[str], Any]) -> None:
        """Add a run as the first argument, `where`; `kind` makes of the word what the command takes."""
        self.takes("where", "RUN", "a config, a run, one of its checkpoints, or an export", type=kind)

    def writes(
        self, help: str, metavar: str = "FILE", *, required: bool = True, force: bool = False, **settings: Any
    ) -> None:
        """Add --output, and --force where a command has it."""
        self.takes("--output", metavar, help, type=output_path, required=required, **settings)
        if force:
            self.flag("--force", "replace what is at --output")

    # --------------------------------------------------------------------------------------------------------- parsing
    def run(self, rest: list[str]) -> int:
        """Do what the words behind the command's name ask for and return the exit code."""
        options = self.parse(rest)
        rank = os.environ.get("RANK", "")
        if not self.ranks and rank:  # torchrun started this process
            if rank != "0":
                say_line(f"[rank {rank}] `{self.prog}` takes one process: only rank 0 runs it", sys.stderr)
                return 0
            os.environ["WORLD_SIZE"] = "1"
        if hasattr(self.module, "run"):
            found = self.module.run(self, options)
        else:
            name = self.name.replace(" ", "_")
            found = getattr(import_module(f"fastsuncet.commands.{name}"), name)(**vars(options))
        return found if isinstance(found, int) else 0

    def parse(self, rest: list[str]) -> Options:
        """Parse the words behind the command's name: options, a config and its overrides in any order.

        Of a command that takes a config the options have it as `config`; of another one that takes overrides, the word
        before them as `name`, and the `overrides`.
        """
        line = [*self.name.split(), *rest]
        options = self.parse_intermixed_args(rest)
        if not self.operand:
            return options
        words = vars(options).pop("words")
        overrides = [each for each in words if OVERRIDE.match(each)]
        files = [each for each in words if each and not OVERRIDE.match(each)]  # "$CONFIG" can be empty
        if not files:
            self.error(f"which config? For example: fastsuncet {' '.join(line)} digits_demo")
        if len(files) > 1:
            self.error(
                f"expected one config, not {len(files)} ({', '.join(files)}). "
                "Write a change to it as section.key=value, in quotes if it has spaces"
            )
        if self.operand == "CONFIG":
            options.config = load(files[0], overrides)
        else:
            options.name, options.overrides = files[0], overrides
        if self.ranks:
            options.arguments = line
        return options

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            message = f"unknown argument {match[1]}"
            if near := get_close_matches(match[1], self._option_string_actions, 1, 0.7):
                message += f"; did you mean {near[0]}?"
            elif self.operand and match[1].startswith("--"):
                message += (
                    "; a setting is section.key=value, and CUDA_VISIBLE_DEVICES=0,1 shows a command two GPUs"
                )
        raise ConfigError(f"{message}\nSee `{self.prog} --help`")


# ------------------------------------------------------------------------------------------------- values of arguments
def whole(least: int) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number of `least` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, not {text}")
        return int(text)

    return parse


def share(text: str) -> tuple[int, int]:
    """Return (I, N) of an argument "I/N", share I of N of a job array, counted from 1."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"is I/N with 1 <= I <= N, such as 3/8, not {text!r}")
    return number, count


def output_path(text: str) -> Path:
    """Return the path of a file or folder to write."""
    found = path(text)
    # While it is written, something hidden with a longer name is next to it, and names end at 255 bytes.
    if len(os.fsencode(found.name)) > 240:
        raise argparse.ArgumentTypeError("a name has at most 240 bytes")
    return found


def load(name: str | Path, overrides: Iterable[str] = ()) -> "Config":
    """Load a config. Raises ConfigErrors."""
    from fastsuncet.config import load_config

    return load_config(name, overrides)


def config_or_run(text: str) -> "Config | Path":
    """Return the config that an argument is the file or the shipped name of, its data required; else a run's path."""
    where = path(text)
    if not is_config(where):
        return where
    config = load(where)
    config.require_data()
    return config


def run_folder(text: str, overrides: Iterable[str] = ()) -> Path:
    """Return the folder of the run of a config, or any other path as it is. Raises ConfigError for its overrides."""
    where = path(text)
    if is_config(where):
        return load(where, overrides).run_folder
    if overrides:
        raise ConfigError(f"{where} is no config, and only a config has keys to override")
    return where


def is_config(where: Path) -> bool:
    """Return whether `where`, which can also be a run, is a config file or the name of a shipped one."""
    from fastsuncet.config.shipped import shipped

    return where.suffix in (".yaml", ".yml") or (not where.exists() and str(where) in shipped())


# ------------------------------------------------------------------------------------------------------------- overview
def overview(names: Iterable[str]) -> str:
    """Return the list of commands, with the first lines of their docstrings."""
    lines = "\n".join(f"  {name:<11} {_module(name).__doc__.strip().splitlines()[0]}" for name in names)
    return f"""\
usage: fastsuncet COMMAND ...

Pre-trains image encoders with the labels of some of the images (SimCLR +
SuNCEt, PAWS and others), evaluates, exports and uses them.

commands:
{lines}

`fastsuncet COMMAND --help` explains a command with examples. First steps:

  fastsuncet doctor
  fastsuncet demo                                without data of your own
  fastsuncet init photos --labels labels.csv     with your own: writes mine.yaml
  fastsuncet train mine.yaml
  fastsuncet predict mine.yaml photos --output predictions.csv
  fastsuncet suggest mine.yaml --output next.csv --page

{EXIT_CODES}"""


def _module(name: str) -> Any:
    return import_module(f"fastsuncet.cli.{name.replace(' ', '_')}")
