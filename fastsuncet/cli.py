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
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fastsuncet.commands import help as texts
from fastsuncet.console import say_line, typed_path
from fastsuncet.distributed.signals import end_with_parent
from fastsuncet.errors import CheckpointError, FastSuncetError
from pipelines.data_errors import DataError

if TYPE_CHECKING:
    from fastsuncet.config import Config

OVERRIDE = re.compile(r"[^=/\\]*=")  # a path can hold a = after its first slash
# OS errors that the user must fix: disk full, permission denied.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
PERMISSION = (errno.EROFS, errno.EACCES, errno.EPERM)
LOST = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV)  # a disk, a file server, a mount


class UsageError(FastSuncetError):
    """The command line cannot be understood."""

    exit_code = 2


class Command(NamedTuple):
    """A sub-command."""

    run: "Run"
    takes: str  # what its overrides change: "CONFIG", which is loaded, or another word; "": it takes none
    arguments: list[tuple[tuple[str, ...], dict[str, Any]]]  # of its own, as `add_argument` takes them


# Takes the command's parser and options, and returns the exit code; None is 0.
Run = Callable[["Parser", argparse.Namespace], int | None]
RUN: dict[str, Command] = {}


def command(*names: str, takes: str = "") -> Callable[[Run], Run]:
    """Make a function the sub-command of these names, with the arguments that `option` declares below it."""

    def register(run: Run) -> Run:
        RUN.update(dict.fromkeys(names, Command(run, takes, run.__dict__.get("arguments", []))))
        return run

    return register


def option(*names: str, **settings: Any) -> Callable[[Run], Run]:
    """Declare an option or an argument of a sub-command, with what argparse's `add_argument` takes."""

    def declare(run: Run) -> Run:
        run.__dict__.setdefault("arguments", []).insert(0, (names, settings))
        return run

    return declare


flag = partial(option, action="store_true")


class Parser(argparse.ArgumentParser):
    """argparse for one command, with errors in the form of our others, which name the nearest option or setting."""

    def __init__(self, name: str):
        above, below = texts.help_of(name)
        super().__init__(
            prog=f"fastsuncet {name}",
            description=above,
            epilog=below,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.name, self.takes, self.arguments = name, RUN[name].takes, list[str]()
        declared = {names[0]: (names, settings) for names, settings in RUN[name].arguments}
        one_of = ("--step", "--every-checkpoint")  # a command with the second has both
        group = self.add_mutually_exclusive_group() if one_of[1] in declared else self
        for first, (names, settings) in declared.items():
            (group if first in one_of else self).add_argument(*names, **settings)
        if self.takes:
            self.usage = f"{self.prog} {self.takes} [section.key=value ...] [options]"
            words = "a YAML file or the name of a shipped config, and changes to it as section.key=value"
            self.add_argument("words", nargs="*", metavar=self.takes, help=words)

    @property
    def words(self) -> list[str]:
        """The whole command line behind `fastsuncet`, which starts the same command on further ranks."""
        return [*self.name.split(), *self.arguments]

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse the words behind the command's name: options, a config and its overrides in any order."""
        self.arguments = arguments
        options = self.parse_intermixed_args(arguments)
        if not self.takes:
            return options
        words = vars(options).pop("words")
        overrides = [each for each in words if OVERRIDE.match(each)]
        files = [each for each in words if not OVERRIDE.match(each)]
        if not files:
            self.error(f"which config? For example: {self.prog} digits_demo")
        if len(files) > 1:
            self.error(
                f"expected one config, not {len(files)} ({', '.join(files)}). Write changes to it as section.key=value"
            )
        if self.takes == "CONFIG":
            options.config = _load(files[0], overrides)
        else:
            options.what, options.overrides = files[0], overrides
        return options

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        match = re.match(r"unrecognized arguments: (\S+)", message)
        if taken := re.match(r"argument (\S+): ignored explicit argument '(.*)'", message):
            match = ("", f"{taken[1]}={taken[2]}")
        if match:
            near = get_close_matches(match[1], self._option_string_actions, 1, 0.7)
            message = f"unknown argument {match[1]}"
            if near:
                message += f"; did you mean {near[0]}?"
            elif match[1].partition("=")[0] in ("--gpus", "--num-gpus", "--devices", "--nproc-per-node"):
                message += (
                    "; a command uses all GPUs that it sees, and CUDA_VISIBLE_DEVICES=0,1 shows it these two"
                )
            elif settings := self._settings(match[1]):
                message += f"; write {settings}"
        raise UsageError(f"{message}\nSee `{self.prog} --help`")

    def _settings(self, option: str) -> str:
        """Return the settings that `--name value` or `--name=value` can mean: "section.name=value"."""
        if not option.startswith("--") or not self.takes:
            return ""
        from fastsuncet.config.messages import keys_ending_in, nearest_key
        from fastsuncet.config.problems import words
        from fastsuncet.config.schema import CONFIG

        name, _, value = option.removeprefix("--").partition("=")
        after = dict(zip(self.arguments, self.arguments[1:])).get(option, "")
        value = value or ("" if after.startswith("-") else after) or "VALUE"
        leaf = name.rpartition(".")[2].replace("-", "_")
        keys = [name] if name in CONFIG.values else keys_ending_in(CONFIG, leaf)
        keys = keys or list(filter(None, [nearest_key(CONFIG, leaf, {})]))
        return words([f"{key}={value}" for key in keys]) if keys else ""


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, not {text}")
    return int(text)


def _path(text: str) -> Path:
    return typed_path(text)


def _output(text: str) -> Path:
    path = _path(text)
    # While it is written, something hidden with a longer name is next to it, and names end at 255 bytes.
    if "\0" in text or len(os.fsencode(path.name)) > 240:
        raise argparse.ArgumentTypeError("a name has at most 240 bytes, none of them zero")
    return path


def _load(name: str | Path, overrides: Sequence[str] = ()) -> "Config":
    from fastsuncet.config import load_config

    return load_config(name, overrides)


def _is_config(where: Path) -> bool:
    """Return whether `where`, which can also be a run, is a config file or the name of a shipped one."""
    from fastsuncet.config.reader import shipped

    return where.suffix in (".yaml", ".yml") or (not where.exists() and str(where) in shipped())


# ---------------------------------------------------------------------------------------------- the sub-commands
_encoder = option(
    "--encoder",
    metavar="PATH",
    type=_path,
    help="a run, one of its checkpoints, or a file of weights (default: the config's run)",
)
_step = option("--step", metavar="N", type=_count, help="this checkpoint of the run (default: the newest)")
_every = flag("--every-checkpoint", dest="every", help="every good checkpoint of the run")
_force = flag("--force", help="replace what is at --output")


@command("init")
@option("folder", metavar="FOLDER", type=_path, help="images: class folders, any tree, or tar shards")
@option("--labels", metavar="FILE", type=_path, help="a CSV of lines file,label")
@option("--hours", metavar="H", type=float, default=1.0, help="for the training (default: 1)")
@option("--weights", metavar="W", help="a file or a run, a network of timm's, or none (default: timm's)")
@option("--output", metavar="FILE", type=_path, default="mine.yaml", help="(default: mine.yaml)")
def _init(parser: Parser, options: argparse.Namespace) -> None:
    from fastsuncet.commands.init import init

    init(**vars(options))


@command("train", takes="CONFIG")
@flag("--dry-run", help="check everything and print the plan; train nothing")
# An option of its own: with a value that may be absent, `--dry-run CONFIG` would take the config for it.
@option(
    "--dry-run=step",
    dest="dry_run",
    action="store_const",
    const="step",
    help="the same, then make a few real steps; print their time and memory, keep nothing",
)
@flag("--show-config", help="print all keys behind the plan of a dry run, with their values in this run")
def _train(parser: Parser, options: argparse.Namespace) -> int:
    if not options.dry_run:  # which prints a plan without data too
        if options.show_config:
            parser.error("--show-config goes with --dry-run")
        options.config.require_data()
    from fastsuncet.commands.train import run

    return run(arguments=parser.words, **vars(options))


@command("tune", takes="CONFIG")
@option("--minutes", metavar="M", type=float, default=20.0, help="start nothing after this (default: 20)")
@option(
    "--output", metavar="FILE", type=_output, required=True, help="the config to write, such as fast.yaml"
)
def _tune(parser: Parser, options: argparse.Namespace) -> int:
    from fastsuncet.commands.tune import run

    return run(arguments=parser.words, **vars(options))


@command("finetune", takes="CONFIG")
@_encoder
@_step
@_every
def _finetune(parser: Parser, options: argparse.Namespace) -> int:
    options.config.require_data(validation=True)
    from fastsuncet.commands.finetune import finetune

    return finetune(arguments=parser.words, **vars(options))


@command("transfer", takes="CONFIG")
@option("--cell", metavar="I/N", default="1/1", help="share I of N of the grid's cells, for a job array")
@_encoder
@_step
def _transfer(parser: Parser, options: argparse.Namespace) -> int:
    from fastsuncet.commands.transfer import transfer

    return transfer(arguments=parser.words, **vars(options))


@command(*(f"evaluate {kind}" for kind in ("knn", "npi", "linear", "accuracy")), takes="CONFIG")
@_encoder
@_step
@_every
def _evaluate(parser: Parser, options: argparse.Namespace) -> int:
    kind = parser.name.split()[1]
    options.config.require_data(
        validation=kind not in ("knn", "linear")
    )  # which can do with the labels alone
    from fastsuncet.commands.evaluate import evaluate

    return evaluate(kind=kind, arguments=parser.words, **vars(options))


@command("export", takes="RUN or CONFIG")
@option("--to", metavar="FORMAT", required=True, choices=texts.EXPORTS, help=", ".join(texts.EXPORTS))
@option("--output", metavar="PATH", type=_output, help="the file or folder (default: one in RUN/export)")
@_step
@_force
def _export(parser: Parser, options: argparse.Namespace) -> None:
    where, overrides = _path(vars(options).pop("what")), vars(options).pop("overrides")
    if _is_config(where):
        where = _load(where, overrides).run_folder
    elif overrides:
        parser.error(f"{where} is no config, and only a config has keys to override")
    from fastsuncet.commands.export import export

    export(where, **vars(options))


@command("embed")
@option("run", metavar="RUN", type=_path, help="a config, a run, one of its checkpoints, or an export")
@option("folder", metavar="FOLDER", type=_path, help="any tree of images")
@option("--output", metavar="FILE", type=_output, required=True, help="a .npz or .parquet file")
@option("--batch", metavar="N", type=_count, default=256, help="images at a time (default: 256)")
@_force
def _embed(parser: Parser, options: argparse.Namespace) -> None:
    if not options.batch:
        parser.error("argument --batch: must be 1 or more")
    where = vars(options).pop("run")
    if _is_config(where):
        where = _load(where).run_folder
    from fastsuncet.commands.embed import embed

    embed(where, **vars(options))


@command("suggest")
@option("run", metavar="RUN", type=_path, help="a config, a run, one of its checkpoints, or an export")
@option("--count", metavar="N", type=_count, default=50, help="images to label (default: 50)")
@option("--output", metavar="FILE", type=_output, required=True, help="a .csv file")
@flag("--page", help="also write a page to label them on: the name of --output, ending in .html")
@_force
def _suggest(parser: Parser, options: argparse.Namespace) -> None:
    if not options.count:
        parser.error("argument --count: must be 1 or more")
    run = vars(options).pop("run")
    where = _load(run) if _is_config(run) else run
    from fastsuncet.commands.suggest import suggest

    suggest(where, **vars(options))


@command("predict")
@option("run", metavar="RUN", type=_path, help="a config, a run, one of its checkpoints, or an export")
@option("folder", metavar="FOLDER", type=_path, help="any tree of images")
@option("--output", metavar="FILE", type=_output, required=True, help="a .csv or .parquet file")
@option("--batch", metavar="N", type=_count, default=256, help="images at a time (default: 256)")
@flag("--page", help="also write a page of pictures: the name of --output, ending in .html")
@flag("--skip-bad", help="go on without the images that cannot be decoded, and list them")
@_force
def _predict(parser: Parser, options: argparse.Namespace) -> None:
    if not options.batch:
        parser.error("argument --batch: must be 1 or more")
    run = vars(options).pop("run")
    where = _load(run) if _is_config(run) else run
    from fastsuncet.commands.predict import predict

    predict(where, **vars(options))


@command("sweep", takes="SWEEP")
@flag("--dry-run", help="check all configs and print all commands; start nothing")
@flag("--list", dest="show", help="print the state of every run; start nothing")
@option("--only", metavar="NAME", action="append", default=[], help="only these runs; wildcards * and ?")
@option("--task", metavar="I/N", help="share I of N of the runs, for a job array")
@flag("--keep-going", help="continue with the other runs after a failure")
def _sweep(parser: Parser, options: argparse.Namespace) -> int:
    from fastsuncet.commands.sweep import sweep

    return sweep(vars(options).pop("what"), **vars(options))


@command("preview", takes="CONFIG")
@option(
    "--output", metavar="FILE", type=_output, default="views.png", help="the picture (default: views.png)"
)
@option("--step", metavar="N", type=_count, default=0, help="draw the views of this step (default: 0)")
@_force
def _preview(parser: Parser, options: argparse.Namespace) -> None:
    options.config.require_data()
    from fastsuncet.commands.preview import preview

    print(f"wrote {preview(options.config, options.output, step=options.step, force=options.force)}")


@command("data check", takes="FOLDER or CONFIG")
def _check(parser: Parser, options: argparse.Namespace) -> None:
    is_folder = os.path.isdir(options.what)
    if is_folder and options.overrides:
        parser.error(f"{options.what} is a folder, and a folder has no keys to override")
    config = None if is_folder else _load(options.what, options.overrides)
    from fastsuncet.commands.data_check import check_config, check_folder

    check_folder(Path(options.what)) if config is None else check_config(config)


@command("data pack", takes="CONFIG")
@option("--output", metavar="FOLDER", type=_output, help="the pack (default: data.pack)")
def _pack(parser: Parser, options: argparse.Namespace) -> None:
    from fastsuncet.commands.data_pack import pack

    pack(**vars(options))


@command("demo")
@option("overrides", nargs="*", metavar="section.key=value", help="changes to both configs")
@option("--seed", metavar="N", type=_count, default=0, help="of both runs (default: 0)")
@option(
    "--folder", metavar="DIR", type=_output, default="runs/demo", help="for all files (default: runs/demo)"
)
def _demo(parser: Parser, options: argparse.Namespace) -> None:
    from fastsuncet.commands.demo import demo

    demo(**vars(options))


@command("report")
@option("runs", nargs="*", metavar="RUN", type=_path, help="the folder of a run, of any seed and method")
@option(
    "--baseline", metavar="RUN", type=_path, help="compare with this run (default: the one without labels)"
)
@option(
    "--metric",
    metavar="NAME",
    action="append",
    default=[],
    help="top1, top5, knn, rankme, ... (default: top1)",
)
@option("--paper", metavar="FIGURE", nargs="?", const="", help="also draw the points of the paper")
@flag("--lengths", help="merge runs that differ only in length into one curve")
@option("--output", metavar="DIR", type=_output, default="report", help="for all files (default: report)")
@flag("--page", help="write RUN/page.html instead: one run's curves, settings, weights")
@flag("--watch", help="the same, and anew while the run goes on")
def _report(parser: Parser, options: argparse.Namespace) -> None:
    if options.page or options.watch:
        return _page(parser, options)
    if options.paper and Path(options.paper).is_dir():  # `--paper runs/a`: the name of a figure was left out
        options.runs, options.paper = [Path(options.paper), *options.runs], ""
    runs = options.runs
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


def _page(parser: Parser, options: argparse.Namespace) -> None:
    if not options.runs:
        parser.error(f"which run? For example: {parser.prog} --page runs/cifar10_suncet")
    taken = [name for name in ("baseline", "metric", "paper", "lengths") if getattr(options, name)]
    if taken := [*taken, *(["output"] if str(options.output) != "report" else [])]:
        parser.error(
            f"--page writes page.html into each run's folder; --{taken[0]} belongs to a comparison of runs"
        )
    from fastsuncet.commands.report import page

    if options.watch:
        page.watch(options.runs)
    else:
        for run in options.runs:
            print(f"wrote {page.write_page(run)}")


@command("configs")
@option("name", nargs="?", metavar="NAME", help="print this config (default: list all)")
@option(
    "--copy", metavar="FILE", type=_output, nargs="?", const="", help="write it to FILE (default: its name)"
)
def _configs(parser: Parser, options: argparse.Namespace) -> None:
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


@command("config")
@option(
    "key", nargs="?", default="", metavar="SECTION.KEY", help="a key or a section (default: all sections)"
)
@flag("--json-schema", help="print a JSON schema, from which editors complete")
def _config(parser: Parser, options: argparse.Namespace) -> None:
    from fastsuncet.commands import config

    if options.json_schema:
        print(json.dumps(config.json_schema(), indent=2))
    else:
        print("\n".join(config.describe(options.key)))


@command("build")
@flag("--prebuilt", help="keep it for all users of this installation")
def _build(parser: Parser, options: argparse.Namespace) -> int:
    from pipelines.dali.view_operator.__main__ import main as build

    return build(["--prebuilt"] if options.prebuilt else [])


@command("completion")
@option("shell", choices=("bash", "zsh"), help="print the script for this shell")
def _completion(parser: Parser, options: argparse.Namespace) -> None:
    from fastsuncet.commands.completion import completion

    print(completion(options.shell, {name: Parser(name) for name in RUN}), end="")


@command("doctor")
def _doctor(parser: Parser, options: argparse.Namespace) -> int:
    from fastsuncet.commands.doctor import doctor

    return doctor()


@command("version")
def _version(parser: Parser, options: argparse.Namespace) -> None:
    from fastsuncet.versions import DALI, __version__, installed

    print(f"fastsuncet {__version__}\npython {sys.version.split()[0]}")
    for name in ("torch", "torchvision", "timm", *DALI, "numpy"):
        if version := installed(name):
            print(f"{name} {version}")


# ------------------------------------------------------------------------------------------------ from start to end
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
    if arguments[:2] == ["tune", "--child"]:  # what the command starts to try one contender
        from fastsuncet.tuning.child import main

        return main(*arguments[2:])
    for name in RUN:
        words = name.split()
        if arguments[: len(words)] == words:
            parser = Parser(name)
            return RUN[name].run(parser, parser.parse(arguments[len(words) :])) or 0
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
    code = _run(arguments)
    distributed = sys.modules.get("torch.distributed")
    if arguments is None and code and distributed and distributed.is_initialized():
        # After an error the ranks' group is left as it is (launch.join). Its threads can abort the interpreter's end,
        # and the job would have the abort's exit code (-6).
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _run(arguments: list[str] | None) -> int:
    """Do what `main` describes, but leave the end of the process to it."""
    if arguments is None and sys.getfilesystemencoding() != "utf-8":
        # Configs and lists are UTF-8 and name files. In another locale Python would look for files of other names.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if sys.stdout is None:  # the process was started without one
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
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
        if error.errno not in (*DISK_FULL, *PERMISSION, *LOST):
            raise
        what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        fix = "Free some disk space" if error.errno in DISK_FULL else "Check the owner and mode of the folder"
        if error.errno in LOST:
            fix = "The disk, the file server or its mount failed: see the system's log (dmesg)"
        _print_error(f"{what}. {fix}, or choose another folder")
        return CheckpointError.exit_code


def _print_error(message: str) -> None:
    """Print the error being handled on stderr, with its rank, and its traceback if that was asked for."""
    if os.environ.get("FASTSUNCET_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exc()
    rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
    say_line(f"{rank}error: {message}", sys.stderr)
