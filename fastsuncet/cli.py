"""The command `fastsuncet`: its sub-commands, and the exit code that each failure ends with.

Torch and DALI are imported by the command that needs them and not before: help and a wrong config take a moment.
"""

import argparse
import errno
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fastsuncet import __version__
from fastsuncet.commands import help as cli_help
from fastsuncet.errors import CheckpointError, FastSuncetError
from pipelines.data_errors import DataError

if TYPE_CHECKING:
    from fastsuncet.config import Config

OVERRIDE = re.compile(r"[^=/\\]*=")  # a path may hold a = after its first slash
# What no code can mend and every file of every command may meet: no room, no right.
OF_THE_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class UsageError(FastSuncetError):
    """The command line cannot be understood."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """argparse, with errors that look like our others and name the nearest option."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        match = re.match(r"unrecognized arguments: (\S+)", message)
        if match:
            known = [option for action in self._actions for option in action.option_strings]
            near = get_close_matches(match[1], known, 1)
            message = f"{match[1]} is not read here" + (f"; did you mean {near[0]}?" if near else "")
        raise UsageError(f"{message}\n`{self.prog} --help` shows what there is")


# ---------------------------------------------------------------------------------------------- the sub-commands
def _train(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the plan, train nothing"
    )
    options = _with_config(parser, arguments)
    config = _load(options)
    from fastsuncet.commands.train import run

    return run(config, ["train", *arguments], dry_run=options.dry_run)


def _finetune(parser: Parser, arguments: list[str]) -> int:
    options = _with_encoder(parser, arguments)
    config = _load(options)
    from fastsuncet.commands.finetune import finetune

    where = None if options.encoder is None else Path(options.encoder)
    return finetune(config, arguments, encoder=where, step=options.step, every=options.every_checkpoint)


def _transfer(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument(
        "--encoder",
        metavar="PATH",
        help="a run, one of its checkpoints, or a file of weights (default: this run)",
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="this checkpoint of the run (default: the newest)"
    )
    parser.add_argument(
        "--cell", metavar="I/N", default="1/1", help="share I of N of the grid's cells, for an array of jobs"
    )
    options = _with_config(parser, arguments)
    if options.step is not None and options.step < 0:
        parser.error(f"--step is a whole number, 0 or more, not {options.step}")
    config = _load(options)
    from fastsuncet.commands.transfer import transfer
    from fastsuncet.evaluation.transfer_grid.grid import parse_shard

    where = None if options.encoder is None else Path(options.encoder)
    return transfer(config, arguments, encoder=where, step=options.step, shard=parse_shard(options.cell))


def _evaluate(kind: str, parser: Parser, arguments: list[str]) -> int:
    options = _with_encoder(parser, arguments)
    config = _load(options)
    from fastsuncet.commands.evaluate import evaluate

    where = None if options.encoder is None else Path(options.encoder)
    command = ["evaluate", kind, *arguments]
    return evaluate(config, kind, command, encoder=where, step=options.step, every=options.every_checkpoint)


def _sweep(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument(
        "--dry-run", action="store_true", help="check every config, print every command, start nothing"
    )
    parser.add_argument("--list", action="store_true", help="print how far every run is, start nothing")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="these runs; * and ? stand in"
    )
    parser.add_argument("--task", metavar="I/N", help="share I of N of the runs, for an array of jobs")
    parser.add_argument("--keep-going", action="store_true", help="go on with the other runs where one fails")
    options = _with_config(parser, arguments, "SWEEP")
    from fastsuncet.commands.sweep import sweep

    return sweep(
        options.config,
        options.overrides,
        task=options.task,
        patterns=options.only,
        dry_run=options.dry_run,
        show=options.list,
        keep_going=options.keep_going,
    )


def _preview(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument(
        "--output", metavar="FILE", default="views.png", help="the picture (default: views.png)"
    )
    parser.add_argument(
        "--step", metavar="N", type=int, default=0, help="draw what this step sees (default: 0)"
    )
    options = _with_config(parser, arguments)
    if options.step < 0:
        parser.error(f"--step is a whole number, 0 or more, not {options.step}")
    config = _load(options)
    from fastsuncet.commands.preview import preview

    print(f"wrote {preview(config, Path(options.output), step=options.step)}")
    return 0


def _check(parser: Parser, arguments: list[str]) -> int:
    options = _with_config(parser, arguments)
    if not os.path.isdir(options.config):
        config = _load(options)
        from fastsuncet.commands.data_check import check_config

        check_config(config)
        return 0
    if options.overrides:
        parser.error(f"{options.config} is a folder, and a folder has no keys to override")
    from fastsuncet.commands.data_check import check_folder

    check_folder(Path(options.config))
    return 0


def _pack(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--output", metavar="FOLDER", help="the pack (default: data.pack)")
    options = _with_config(parser, arguments)
    config = _load(options)
    from fastsuncet.commands.data_pack import pack

    pack(config, None if options.output is None else Path(options.output))
    return 0


def _demo(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="what to change in both configs"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of both runs (default: 0)")
    parser.add_argument(
        "--folder", metavar="DIR", default="runs/demo", help="for everything (default: runs/demo)"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed is a whole number, 0 or more, not {options.seed}")
    configs = Path("configs")
    if not configs.is_dir():  # called from elsewhere: those of the checkout this package lies in
        configs = Path(__file__).resolve().parents[1] / "configs"
    from fastsuncet.commands.demo import demo

    demo(configs, Path(options.folder), seed=options.seed, overrides=tuple(options.overrides))
    return 0


def _report(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the folder of a run, of any seed and method")
    parser.add_argument(
        "--baseline", metavar="RUN", help="compare with this one (default: the one without labels)"
    )
    parser.add_argument(
        "--metric", metavar="NAME", action="append", default=[], help="top1, top5, knn, ... (default: top1)"
    )
    parser.add_argument(
        "--paper", metavar="FIGURE", nargs="?", const="", help="draw the paper's own points beside the runs'"
    )
    parser.add_argument(
        "--lengths",
        action="store_true",
        help="runs of several lengths are one curve of their last checkpoints",
    )
    parser.add_argument("--output", metavar="DIR", default="report", help="for everything (default: report)")
    options = parser.parse_intermixed_args(arguments)
    if options.paper and Path(options.paper).is_dir():  # `--paper runs/a`: a figure's name was left out
        options.runs, options.paper = [options.paper, *options.runs], ""
    runs = [Path(run) for run in options.runs]
    if not runs and options.baseline is None and options.paper is None:
        parser.error(f"which runs? For example: {parser.prog} runs/cifar10_simclr runs/cifar10_suncet")
    from fastsuncet.commands.report import paper, report

    figures = [options.paper] if options.paper else [paper.TEN] if runs else [paper.TEN, paper.ONE]
    baseline = Path(options.baseline) if options.baseline else None
    shown = [] if options.paper is None else figures
    report(
        runs,
        Path(options.output),
        baseline=baseline,
        metrics=options.metric,
        figures=shown,
        lengths=options.lengths,
    )
    return 0


def _doctor(parser: Parser, arguments: list[str]) -> int:
    parser.parse_args(arguments)
    from fastsuncet.commands.doctor import doctor

    return doctor()


def _version(parser: Parser, arguments: list[str]) -> int:
    parser.parse_args(arguments)
    from fastsuncet.versions import DALI, installed

    print(f"fastsuncet {__version__}\npython {sys.version.split()[0]}")
    packages = ("torch", "torchvision", "timm", *DALI, "numpy")
    for line in [f"{name} {there}" for name in packages if (there := installed(name))]:
        print(line)
    return 0


COMMANDS: dict[str, tuple[Callable[[Parser, list[str]], int], cli_help.Help]] = {
    "train": (_train, cli_help.TRAIN),
    "finetune": (_finetune, cli_help.FINETUNE),
    "transfer": (_transfer, cli_help.TRANSFER),
    "evaluate knn": (partial(_evaluate, "knn"), cli_help.KNN),
    "evaluate npi": (partial(_evaluate, "npi"), cli_help.NPI),
    "evaluate linear": (partial(_evaluate, "linear"), cli_help.LINEAR),
    "evaluate accuracy": (partial(_evaluate, "accuracy"), cli_help.ACCURACY),
    "sweep": (_sweep, cli_help.SWEEP),
    "preview": (_preview, cli_help.PREVIEW),
    "data check": (_check, cli_help.CHECK),
    "data pack": (_pack, cli_help.PACK),
    "demo": (_demo, cli_help.DEMO),
    "report": (_report, cli_help.REPORT),
    "doctor": (_doctor, cli_help.DOCTOR),
    "version": (_version, cli_help.VERSION),
}


# ------------------------------------------------------------------------------------------- reading the command line
def _with_config(parser: Parser, arguments: list[str], word: str = "CONFIG") -> argparse.Namespace:
    """Reads one config and its overrides, mixed with options in any order."""
    parser.add_argument("words", nargs="*", metavar=word, help="a YAML file, and what to change in it")
    options = parser.parse_intermixed_args(arguments)
    options.overrides = [word for word in options.words if OVERRIDE.match(word)]
    files = [word for word in options.words if not OVERRIDE.match(word)]
    if not files:
        parser.error(f"which config? For example: {parser.prog} configs/digits_demo.yaml")
    if len(files) > 1:
        parser.error(
            f"one config at a time, not {len(files)} ({', '.join(files)}); what to change in it is written "
            "section.key=value"
        )
    options.config = files[0]
    return options


def _with_encoder(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """One config, and which encoder or encoders are meant."""
    parser.add_argument(
        "--encoder",
        metavar="PATH",
        help="a run, one of its checkpoints, or a file of weights (default: this run)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", metavar="N", type=int, help="this checkpoint of the run (default: the newest)"
    )
    which.add_argument("--every-checkpoint", action="store_true", help="each good checkpoint of the run")
    options = _with_config(parser, arguments)
    return options


def _load(options: argparse.Namespace) -> "Config":
    from fastsuncet.config import load_config

    return load_config(options.config, options.overrides)


def _mortal() -> None:
    """Lets SIGTERM end this process wherever no command asks for it, also as process 1, which a container's command is.

    The kernel drops what process 1 does not handle: a container stopped while it imports torch would start to train.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


def _dispatch(arguments: list[str]) -> int:
    """Runs the sub-command that the first words of `arguments` name."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(cli_help.OVERVIEW)
        return 0 if arguments else UsageError.exit_code
    if arguments[0] in ("-V", "--version"):
        arguments = ["version", *arguments[1:]]
    for name, (run, text) in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            parser = Parser(
                prog=f"fastsuncet {name}",
                usage=_usage(name, text.usage),
                description=text.purpose,
                epilog=text.more,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            return run(parser, arguments[len(words) :])
    raise UsageError(_no_command(arguments))


def _usage(name: str, words: str) -> str:
    """In lines of a terminal's width, further ones below the first; an option stays beside its value."""
    kept = [re.sub(r"\s", "\0", part) for part in re.findall(r"\[[^]]*\]|\S+", words)]
    lines = textwrap.wrap(
        " ".join([f"fastsuncet {name}", *kept]), 92, break_long_words=False, break_on_hyphens=False
    )
    return "\n         ".join(lines).replace("\0", " ")


def _no_command(arguments: list[str]) -> str:
    first = arguments[0]
    group = [name for name in COMMANDS if name.startswith(f"{first} ")]
    second = " ".join(word for word in arguments[1:2] if not word.startswith("-"))
    near = (
        (second and get_close_matches(f"{first} {second}", group, 1))
        or group
        or get_close_matches(" ".join(arguments[:2]), COMMANDS, 1)
        or get_close_matches(first, COMMANDS, 1)
    )
    if not near and first.endswith((".yaml", ".yml")):
        near = [f"train {first}"]
    return (
        f"there is no command {first}"
        + (f"; did you mean {' or '.join(f'`fastsuncet {name}`' for name in near)}?" if near else "")
        + "\n`fastsuncet --help` shows what there is"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line (by default this process's) and returns its exit code; stderr says what went wrong.

    What people can mend is a message; FASTSUNCET_TRACEBACK=1 adds where in the code it arose. Anything else is a
    bug, and Python ends with its traceback and the code 1.
    """
    try:
        _mortal()
        code = _dispatch(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # here, where a reader that went away can still be met
        return code
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has read enough; there is nobody left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FastSuncetError, DataError) as error:
        sys.stdout.flush()
        _tell(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in OF_THE_PLACE:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some room" if full else "This user may not do that: check the owner and the mode"
        _tell(f"{error}. {remedy}, or name another place")
        return CheckpointError.exit_code


def _tell(words: str) -> None:
    """Says on stderr what is being handled, with its rank, and where it arose if that was asked for."""
    if os.environ.get("FASTSUNCET_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exc()
    rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
    print(f"{rank}error: {words}", file=sys.stderr)
