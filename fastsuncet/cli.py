"""The command `fastsuncet`: its sub-commands, and the exit code for each failure.

Each sub-command imports its own module, and with it torch and DALI, only when it runs: help and a wrong config take a
moment.
"""

import argparse
import errno
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastsuncet import __version__
from fastsuncet.commands import help as texts
from fastsuncet.console import say_line
from fastsuncet.distributed.signals import end_with_parent
from fastsuncet.errors import CheckpointError, FastSuncetError
from pipelines.data_errors import DataError

if TYPE_CHECKING:
    from fastsuncet.config import Config

OVERRIDE = re.compile(r"[^=/\\]*=")  # a path can hold a = after its first slash
# OS errors that the user must fix: disk full, permission denied.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
PERMISSION = (errno.EROFS, errno.EACCES, errno.EPERM)


class UsageError(FastSuncetError):
    """The command line cannot be understood."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """argparse, with errors in the form of our others, which name the nearest option or setting."""

    arguments: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        match = re.match(r"unrecognized arguments: (\S+)", message)
        if taken := re.match(r"argument (\S+): ignored explicit argument '(.*)'", message):
            match = ("", f"{taken[1]}={taken[2]}")
        if match:
            known = [option for action in self._actions for option in action.option_strings]
            near = get_close_matches(match[1], known, 1, 0.7)
            message = f"unknown argument {match[1]}"
            if near:
                message += f"; did you mean {near[0]}?"
            elif settings := self._settings(match[1]):
                message += f"; write {settings}"
        raise UsageError(f"{message}\nSee `{self.prog} --help`")

    def _settings(self, option: str) -> str:
        """Return the settings that `--name value` or `--name=value` can mean: "section.name=value"."""
        if not option.startswith("--") or not any(action.dest == "words" for action in self._actions):
            return ""
        from fastsuncet.config.messages import keys_ending_in, nearest_key
        from fastsuncet.config.problems import words
        from fastsuncet.config.schema import CONFIG

        name, _, value = option.removeprefix("--").partition("=")
        after = [*self.arguments, ""][list(self.arguments).index(option) + 1]
        value = value or ("" if after.startswith("-") else after) or "VALUE"
        leaf = name.rpartition(".")[2].replace("-", "_")
        keys = [name] if name in CONFIG.values else keys_ending_in(CONFIG, leaf)
        keys = keys or list(filter(None, [nearest_key(CONFIG, leaf, {})]))
        return words([f"{key}={value}" for key in keys]) if keys else ""


# ---------------------------------------------------------------------------------------------- the sub-commands
def _train(parser: Parser) -> int:
    add = parser.add_argument
    add("--dry-run", action="store_true", help="check everything and print the plan; train nothing")
    # An option of its own: with a value that may be absent, `--dry-run CONFIG` would take the config for it.
    step = "the same, then make one real step; print its time and memory, keep nothing"
    add("--dry-run=step", dest="dry_run", action="store_const", const="step", help=step)
    options, config = _with_config(parser)
    if not options.dry_run:  # which prints a plan without data too
        config.require_data()
    from fastsuncet.commands.train import run

    return run(config, ["train", *parser.arguments], dry_run=options.dry_run)


def _tune(parser: Parser) -> int:
    if parser.arguments[:1] == ["--child"]:  # what the command starts to try one contender
        from fastsuncet.tuning.child import main

        return main(*parser.arguments[1:])
    add = parser.add_argument
    add("--all", dest="everything", action="store_true", help="also try what no run tries itself")
    add("--minutes", metavar="M", type=float, default=10.0, help="start nothing after this (default: 10)")
    add("--output", metavar="FILE", type=Path, default="speed.png", help="the picture (default: speed.png)")
    options, config = _with_config(parser)
    from fastsuncet.commands.tune import run

    words = ["tune", *parser.arguments]
    return run(config, words, options.minutes, options.output, everything=options.everything)


def _finetune(parser: Parser) -> int:
    chosen, config = _with_encoder(parser)
    config.require_data()
    from fastsuncet.commands.finetune import finetune

    return finetune(config, list(parser.arguments), **chosen)


def _transfer(parser: Parser) -> int:
    parser.add_argument(
        "--cell", metavar="I/N", default="1/1", help="share I of N of the grid's cells, for a job array"
    )
    chosen, config = _with_encoder(parser, several=False)
    from fastsuncet.commands.transfer import transfer
    from fastsuncet.evaluation.transfer_grid.grid import parse_shard

    shard = parse_shard(chosen.pop("cell"))
    return transfer(config, list(parser.arguments), shard=shard, **chosen)


def _evaluate(kind: str, parser: Parser) -> int:
    chosen, config = _with_encoder(parser)
    config.require_data()
    from fastsuncet.commands.evaluate import evaluate

    return evaluate(config, kind, ["evaluate", kind, *parser.arguments], **chosen)


def _export(parser: Parser) -> int:
    add = parser.add_argument
    add("--to", metavar="FORMAT", required=True, choices=texts.EXPORTS, help=", ".join(texts.EXPORTS))
    add("--output", metavar="PATH", type=Path, help="the file or folder (default: one in RUN/export)")
    add("--step", metavar="N", type=_count, help="this checkpoint of the run (default: the newest)")
    add("--force", action="store_true", help="replace what is at --output")
    options = _parse_words(parser, "RUN or CONFIG")
    where = Path(options.config).expanduser()
    if _is_config(where):
        where = _load(options).run_folder
    elif options.overrides:
        parser.error(f"{where} is no config, and only a config has keys to override")
    from fastsuncet.commands.export import export

    export(where, options.to, output=options.output, step=options.step, force=options.force)
    return 0


def _embed(parser: Parser) -> int:
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a config, a run, one of its checkpoints, or an export")
    add("folder", metavar="FOLDER", type=Path, help="any tree of images")
    add("--output", metavar="FILE", type=Path, required=True, help="a .npz or .parquet file")
    add("--batch", metavar="N", type=_count, default=256, help="images at a time (default: 256)")
    add("--force", action="store_true", help="replace what is at --output")
    options = parser.parse_intermixed_args(parser.arguments)
    if not options.batch:
        parser.error("argument --batch: must be 1 or more")
    where = options.run.expanduser()
    if _is_config(where):
        from fastsuncet.config import load_config

        where = load_config(where).run_folder
    from fastsuncet.commands.embed import embed

    output = options.output.expanduser()
    embed(where, options.folder.expanduser(), output, batch=options.batch, force=options.force)
    return 0


def _sweep(parser: Parser) -> int:
    add = parser.add_argument
    add("--dry-run", action="store_true", help="check all configs and print all commands; start nothing")
    add("--list", dest="show", action="store_true", help="print the state of every run; start nothing")
    add(
        "--only",
        dest="patterns",
        metavar="NAME",
        action="append",
        default=[],
        help="only these runs; wildcards * and ?",
    )
    add("--task", metavar="I/N", help="share I of N of the runs, for a job array")
    add("--keep-going", action="store_true", help="continue with the other runs after a failure")
    chosen = vars(_parse_words(parser, "SWEEP"))
    from fastsuncet.commands.sweep import sweep

    return sweep(chosen.pop("config"), chosen.pop("overrides"), **chosen)


def _preview(parser: Parser) -> int:
    add = parser.add_argument
    add("--output", metavar="FILE", type=Path, default="views.png", help="the picture (default: views.png)")
    add("--step", metavar="N", type=_count, default=0, help="draw the views of this step (default: 0)")
    options, config = _with_config(parser)
    config.require_data()
    from fastsuncet.commands.preview import preview

    print(f"wrote {preview(config, options.output, step=options.step)}")
    return 0


def _check(parser: Parser) -> int:
    options = _parse_words(parser, "FOLDER or CONFIG")
    is_folder = os.path.isdir(options.config)
    if is_folder and options.overrides:
        parser.error(f"{options.config} is a folder, and a folder has no keys to override")
    what = Path(options.config) if is_folder else _load(options)
    from fastsuncet.commands.data_check import check_config, check_folder

    check_folder(what) if isinstance(what, Path) else check_config(what)
    return 0


def _pack(parser: Parser) -> int:
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="the pack (default: data.pack)")
    options, config = _with_config(parser)
    from fastsuncet.commands.data_pack import pack

    pack(config, options.output)
    return 0


def _demo(parser: Parser) -> int:
    add = parser.add_argument
    add("overrides", nargs="*", metavar="section.key=value", help="changes to both configs")
    add("--seed", metavar="N", type=_count, default=0, help="of both runs (default: 0)")
    add("--folder", metavar="DIR", type=Path, default="runs/demo", help="for all files (default: runs/demo)")
    options = parser.parse_intermixed_args(parser.arguments)
    from fastsuncet.commands.demo import demo

    demo(options.folder, seed=options.seed, overrides=tuple(options.overrides))
    return 0


def _report(parser: Parser) -> int:
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="the folder of a run, of any seed and method")
    add(
        "--baseline", metavar="RUN", type=Path, help="compare with this run (default: the one without labels)"
    )
    add(
        "--metric",
        metavar="NAME",
        action="append",
        default=[],
        help="top1, top5, knn, rankme, ... (default: top1)",
    )
    add("--paper", metavar="FIGURE", nargs="?", const="", help="also draw the points of the paper")
    add("--lengths", action="store_true", help="merge runs that differ only in length into one curve")
    add("--output", metavar="DIR", type=Path, default="report", help="for all files (default: report)")
    add(
        "--page", action="store_true", help="write RUN/page.html instead: one run's curves, settings, weights"
    )
    add("--watch", action="store_true", help="the same, and anew while the run goes on")
    options = parser.parse_intermixed_args(parser.arguments)
    if options.page or options.watch:
        return _page(parser, options)
    if options.paper and Path(options.paper).is_dir():  # `--paper runs/a`: the name of a figure was left out
        options.runs, options.paper = [options.paper, *options.runs], ""
    runs = [Path(run) for run in options.runs]
    if not runs and options.baseline is None and options.paper is None:
        parser.error(f"which runs? For example: {parser.prog} runs/cifar10_simclr runs/cifar10_suncet")
    from fastsuncet.commands.report import paper, report

    figures = [options.paper] if options.paper else [paper.TEN] if runs else [paper.TEN, paper.ONE]
    report(
        runs,
        options.output,
        baseline=options.baseline,
        metrics=options.metric,
        figures=[] if options.paper is None else figures,
        lengths=options.lengths,
    )
    return 0


def _page(parser: Parser, options: argparse.Namespace) -> int:
    runs = [Path(run) for run in options.runs]
    if not runs:
        parser.error(f"which run? For example: {parser.prog} --page runs/cifar10_suncet")
    taken = [name for name in ("baseline", "metric", "paper", "lengths") if getattr(options, name)]
    if taken or str(options.output) != "report":
        name = taken[0] if taken else "output"
        parser.error(
            f"--page writes page.html into each run's folder; --{name} belongs to a comparison of runs"
        )
    from fastsuncet.commands.report import page

    if options.watch:
        page.watch(runs)
    else:
        for run in runs:
            print(f"wrote {page.write_page(run)}")
    return 0


def _configs(parser: Parser) -> int:
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="print this config (default: list all)")
    add("--copy", metavar="FILE", type=Path, nargs="?", const="", help="write it to FILE (default: its name)")
    options = parser.parse_intermixed_args(parser.arguments)
    from fastsuncet.commands import configs

    if options.copy is not None:
        if options.name is None:
            parser.error(f"which config? For example: {parser.prog} in1k_10pct --copy my.yaml")
        file = options.copy if options.copy.name else Path(f"{Path(options.name).name}.yaml")
        configs.copy(options.name, file)
        print(f"wrote {file}")
    elif options.name is not None:
        print(configs.config_text(options.name), end="")
    else:
        print("\n".join(configs.listing()))
    return 0


def _config(parser: Parser) -> int:
    add = parser.add_argument
    add(
        "key", nargs="?", default="", metavar="SECTION.KEY", help="a key or a section (default: all sections)"
    )
    add("--json-schema", action="store_true", help="print a JSON schema, from which editors complete")
    options = parser.parse_args(parser.arguments)
    from fastsuncet.commands import config

    if options.json_schema:
        print(json.dumps(config.json_schema(), indent=2))
    else:
        print("\n".join(config.describe(options.key)))
    return 0


class _Declared(Exception):
    """A command has declared its arguments."""


def _completion(parser: Parser) -> int:
    parser.add_argument("shell", choices=("bash", "zsh"), help="print the script for this shell")
    options = parser.parse_args(parser.arguments)
    from fastsuncet.commands.completion import completion

    print(completion(options.shell, {name: _declared(name) for name in RUN}), end="")
    return 0


def _declared(name: str) -> Parser:
    """Return the parser of a command with its arguments, without parsing anything."""

    def stop(*_: object) -> NoReturn:
        raise _Declared

    parser = Parser(prog=name)
    for method in ("parse_args", "parse_intermixed_args"):
        setattr(parser, method, stop)
    with suppress(_Declared):
        RUN[name](parser)
    return parser


def _build(parser: Parser) -> int:
    parser.add_argument("--prebuilt", action="store_true", help="keep it for all users of this installation")
    options = parser.parse_args(parser.arguments)
    from pipelines.dali.plugin.__main__ import main as build

    return build(["--prebuilt"] if options.prebuilt else [])


def _doctor(parser: Parser) -> int:
    parser.parse_args(parser.arguments)
    from fastsuncet.commands.doctor import doctor

    return doctor()


def _version(parser: Parser) -> int:
    parser.parse_args(parser.arguments)
    from fastsuncet.versions import DALI, installed

    print(f"fastsuncet {__version__}\npython {sys.version.split()[0]}")
    for name in ("torch", "torchvision", "timm", *DALI, "numpy"):
        if version := installed(name):
            print(f"{name} {version}")
    return 0


RUN: dict[str, Callable[[Parser], int]] = {
    "train": _train,
    "tune": _tune,
    "finetune": _finetune,
    "transfer": _transfer,
    **{f"evaluate {kind}": partial(_evaluate, kind) for kind in ("knn", "npi", "linear", "accuracy")},
    "export": _export,
    "embed": _embed,
    "sweep": _sweep,
    "preview": _preview,
    "data check": _check,
    "data pack": _pack,
    "demo": _demo,
    "report": _report,
    "configs": _configs,
    "config": _config,
    "build": _build,
    "completion": _completion,
    "doctor": _doctor,
    "version": _version,
}


# ------------------------------------------------------------------------------------------- reading the command line
def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, not {text}")
    return int(text)


def _parse_words(parser: Parser, word: str = "CONFIG") -> argparse.Namespace:
    """Parse one config, its overrides, and the parser's options, in any order."""
    parser.usage = f"{parser.prog} {word} [section.key=value ...] [options]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar=word,
        help="a YAML file or the name of a shipped config, and changes to it as section.key=value",
    )
    options = parser.parse_intermixed_args(parser.arguments)
    words = vars(options).pop("words")
    options.overrides = [each for each in words if OVERRIDE.match(each)]
    files = [each for each in words if not OVERRIDE.match(each)]
    if not files:
        parser.error(f"which config? For example: {parser.prog} digits_demo")
    if len(files) > 1:
        parser.error(
            f"expected one config, not {len(files)} ({', '.join(files)}). Write changes to it as section.key=value"
        )
    options.config = files[0]
    return options


def _with_config(parser: Parser) -> "tuple[argparse.Namespace, Config]":
    options = _parse_words(parser)
    return options, _load(options)


def _with_encoder(parser: Parser, *, several: bool = True) -> "tuple[dict[str, Any], Config]":
    """Parse one config, and which encoder, or which `several`, to use."""
    parser.add_argument(
        "--encoder",
        metavar="PATH",
        type=Path,
        help="a run, one of its checkpoints, or a file of weights (default: the config's run)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", metavar="N", type=_count, help="this checkpoint of the run (default: the newest)"
    )
    if several:
        help_text = "every good checkpoint of the run"
        which.add_argument("--every-checkpoint", dest="every", action="store_true", help=help_text)
    options, config = _with_config(parser)
    return {
        name: value for name, value in vars(options).items() if name not in ("config", "overrides")
    }, config


def _is_config(where: Path) -> bool:
    """Return whether `where`, which can also be a run, is a config file or the name of a shipped one."""
    from fastsuncet.config.reader import shipped

    return where.suffix in (".yaml", ".yml") or (not where.exists() and str(where) in shipped())


def _load(options: argparse.Namespace) -> "Config":
    from fastsuncet.config import load_config

    return load_config(options.config, options.overrides)


def _handle_sigterm_as_pid1() -> None:
    """Let SIGTERM end this process if it is process 1, as the command of a container is.

    The kernel drops signals that process 1 does not handle, so a container that is stopped while it imports torch would
    start to train. Commands that save on SIGTERM replace this handler.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


def _dispatch(arguments: list[str]) -> int:
    """Run the sub-command that the first words of `arguments` name."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    asked = not {"-h", "--help"}.isdisjoint(arguments)
    if not arguments or (asked and arguments[0].startswith("-")):
        print(texts.overview())
        return 0 if arguments else UsageError.exit_code
    if arguments[0] in ("-V", "--version"):
        arguments = ["version", *arguments[1:]]
    for name, run in RUN.items():
        words = name.split()
        if arguments[: len(words)] == words:
            above, below = texts.help_of(name)
            parser = Parser(
                prog=f"fastsuncet {name}",
                description=above,
                epilog=below,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            parser.arguments = arguments[len(words) :]
            return run(parser)
    group = [name for name in RUN if name.startswith(f"{arguments[0]} ")]
    if asked and group:
        print(texts.overview(group))
        return 0
    raise UsageError(_unknown_command(arguments, group))


def _unknown_command(arguments: list[str], group: list[str]) -> str:
    first = arguments[0]
    second = " ".join(word for word in arguments[1:2] if not word.startswith("-"))
    near = (
        (second and get_close_matches(f"{first} {second}", group, 1))
        or group
        or get_close_matches(" ".join(arguments[:2]), RUN, 1)
        or get_close_matches(first, RUN, 1)
    )
    if not near and first.endswith((".yaml", ".yml")):
        near = [f"train {first}"]
    hint = f"; did you mean {' or '.join(f'`fastsuncet {name}`' for name in near)}?" if near else ""
    return f"unknown command {first}{hint}\nSee `fastsuncet --help`"


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (this process's by default) and return its exit code.

    An error that the user can fix is printed on stderr as a message; FASTSUNCET_TRACEBACK=1 adds its traceback. Any
    other exception is a bug: Python ends with its traceback and exit code 1.
    """
    if arguments is None and sys.getfilesystemencoding() != "utf-8":
        # Configs and lists are UTF-8 and name files. In another locale Python would look for files of other names.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    try:
        _handle_sigterm_as_pid1()
        if isinstance(sys.stdout, io.TextIOWrapper):  # a log in Latin-1 cannot hold every name
            sys.stdout.reconfigure(errors="backslashreplace")
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent started this rank
            end_with_parent()
        code = _dispatch(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        return code
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FastSuncetError, DataError) as error:
        sys.stdout.flush()
        _print_error(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in (*DISK_FULL, *PERMISSION):
            raise
        what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        full = error.errno in DISK_FULL
        fix = "Free some disk space" if full else "Check the owner and mode of the folder"
        _print_error(f"{what}. {fix}, or choose another folder")
        return CheckpointError.exit_code


def _print_error(message: str) -> None:
    """Print the error being handled on stderr, with its rank, and its traceback if that was asked for."""
    if os.environ.get("FASTSUNCET_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exc()
    rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
    say_line(f"{rank}error: {message}", sys.stderr)
