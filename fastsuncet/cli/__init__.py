"""The command `fastsuncet`: its sub-commands, and the exit code for each failure.

Each module here is a sub-command, unless its name begins with an underscore: its docstring is the help, and `arguments`
declares what it takes. Work that needs torch or DALI is in the module of `fastsuncet.commands` with the same name. That
is imported only when the command runs, so help and a wrong config take a moment.
"""

import errno
import io
import os
import pkgutil
import signal
import sys
import traceback
from difflib import get_close_matches

from fastsuncet.cli._parser import Parser, overview
from fastsuncet.distributed.signals import end_with_parent
from fastsuncet.errors import CheckpointError, ConfigError, FastSuncetError
from pipelines.backend import lack_of_gpu_memory
from pipelines.data_errors import LOST, DataError
from pipelines.output import say_line

# The sub-commands: data_check.py is `fastsuncet data check`.
COMMANDS = tuple(
    module.name.replace("_", " ") for module in pkgutil.iter_modules(__path__) if module.name[0] != "_"
)
# OS errors that the user must fix, with `LOST`: disk full, permission denied.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
PERMISSION = (errno.EROFS, errno.EACCES, errno.EPERM)


def _handle_sigterm_as_pid1() -> None:
    """Let SIGTERM end this process if it is process 1, as the command of a container is.

    The kernel drops signals that process 1 does not handle, so a container that is stopped while it imports torch would
    start to train. Commands that save on SIGTERM replace this handler.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


def _open_standard_streams() -> None:
    """Give /dev/null those of the numbers 0 to 2 that this process was started without.

    A file of the run would get them, metrics.jsonl for example, and in it all that libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest one that is free
        os.set_inheritable(number, True)
    os.close(number)


def _dispatch(arguments: list[str]) -> int:
    """Run the sub-command that the first words of `arguments` name."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    asked = not {"-h", "--help"}.isdisjoint(arguments)
    if not arguments or (asked and arguments[0].startswith("-")):
        print(overview(COMMANDS))
        return 0 if arguments else ConfigError.exit_code
    if arguments[0] in ("-V", "--version"):
        arguments = ["version", *arguments[1:]]
    if arguments[:2] == ["tune", "--child"]:  # what the command starts to try one contender
        from fastsuncet.tuning.child import main

        return main(*arguments[2:])
    for name in COMMANDS:
        words = name.split()
        if arguments[: len(words)] == words:
            return Parser(name).run(arguments[len(words) :])
    group = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")]
    if asked and group:
        print(overview(group))
        return 0
    near = group or get_close_matches(" ".join(arguments[:2]), COMMANDS, 1)
    near = near or get_close_matches(arguments[0], COMMANDS, 1)
    hint = f"; did you mean {' or '.join(f'`fastsuncet {name}`' for name in near)}?" if near else ""
    raise ConfigError(f"unknown command {arguments[0]}{hint}\nSee `fastsuncet --help`")


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (this process's by default) and return its exit code.

    An error that the user can fix is printed on stderr as a message; FASTSUNCET_TRACEBACK=1 adds its traceback. Any
    other exception is a bug: Python ends with its traceback and exit code 1.
    """
    try:
        code = _run(arguments)
    except Exception:
        if arguments is not None:
            raise
        traceback.print_exc()
        code = 1
    distributed = sys.modules.get("torch.distributed")
    if arguments is None and code and distributed and distributed.is_initialized():
        # After an error the ranks' group is left as it is (place.join). Its threads can abort the interpreter's end,
        # and the job would have the abort's exit code (-6). Nothing is lost: on its way here the error has left all
        # `with` blocks, and so closed the metrics and the trackers. A checkpoint is written whole or not at all.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _run(arguments: list[str] | None) -> int:
    """Do what `main` describes, but leave bugs and the end of the process to it."""
    if arguments is None and sys.getfilesystemencoding() != "utf-8":
        # Configs and lists are UTF-8 and name files. In another locale Python would look for files of other names.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if arguments is None and "OMP_WAIT_POLICY" not in os.environ:
        # Torch's threads wait for each other in a loop of 300,000 rounds by default. Beside other programs such a wait
        # takes the core that the awaited thread needs: a step of two threads took nine times as long. On a quiet
        # machine 10,000 rounds are as fast, and 1,000 a tenth slower. Read as torch loads.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if arguments is None:
        _open_standard_streams()
    if sys.stdout is None:  # the process was started without one
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or sys.stdout
    try:
        if sys.flags.optimize > 1:
            raise ConfigError(
                "Python runs with -OO or PYTHONOPTIMIZE=2, without the texts that commands and keys are described by: "
                "leave it out"
            )
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
    except RuntimeError as error:
        if (reason := lack_of_gpu_memory(error)) is None:
            raise
        _print_error(
            f"{reason}. `nvidia-smi` shows what other programs take; with CUDA_VISIBLE_DEVICES= in front a command "
            "computes on the CPU"
        )
        return ConfigError.exit_code
    except OSError as error:
        if error.errno not in (*DISK_FULL, *PERMISSION, *LOST):
            raise
        what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        if error.errno in LOST:
            fix = (
                "The disk, the file server or its mount failed: see the system's log (dmesg). When it works again, so "
                "does the same command"
            )
        elif error.errno in DISK_FULL:
            fix = "Free some disk space, or choose another folder"
        else:
            fix = "Check the owner and mode of the folder, or choose another folder"
        _print_error(f"{what}. {fix}")
        return CheckpointError.exit_code


def _print_error(message: str) -> None:
    """Print the error being handled on stderr, with its rank, and its traceback if that was asked for."""
    if os.environ.get("FASTSUNCET_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exc()
    rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK") else ""
    say_line(f"{rank}error: {message}", sys.stderr)
