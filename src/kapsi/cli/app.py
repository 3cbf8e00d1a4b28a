"""The application: its verbs, and how errors are shown."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import typer

from kapsi.cli.data import data, formula_last
from kapsi.cli.demo import demo
from kapsi.cli.evaluate import evaluate
from kapsi.cli.fit import fit
from kapsi.cli.functions import functions
from kapsi.cli.info import info
from kapsi.cli.parity import parity
from kapsi.cli.predict import predict
from kapsi.cli.reproduce import reproduce
from kapsi.errors import KapsiError, nearest
from kapsi.version import __version__

app = typer.Typer(
    name="kapsi",
    help="Fit functions with Reconciled Polynomial Networks, y = <kappa(x), psi(w)> + pi(x).",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (fit, predict, evaluate, info, functions, data, reproduce, parity, demo):
    app.command()(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kapsi {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version.", is_eager=True, callback=_show_version),
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for a mistake of the user, 130 when interrupted.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _end_by_exception()
    for stream in (sys.stdout, sys.stderr):
        # A terminal or file that cannot show a letter is no reason to stop.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(args=formula_last(given), prog_name="kapsi", standalone_mode=False)
        if sys.stdout is not None:  # a closed one
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _refuse(_usage(error, given))
    except KapsiError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads on, and the interpreter's own complaint would be the only thing to see
        return 1
    except OSError as error:
        _let_go_of_output()
        # Files are named where they are written; what is left is what was shown.
        shown = error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG)
        name = f"{error.filename}: " if error.filename else "standard output: " if shown else ""
        return _refuse(f"{name}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search(
            "not enough memory|out of memory|allocate memory", str(error)
        ):
            raise
        return _refuse("there is not enough memory; use fewer rows or a smaller model (kapsi info shows its size)")


def run() -> None:
    """Run the command line as the process: what the installed command does."""
    code = main()
    if code == 130:
        # An interrupt during an import may have marked the process to end by the signal instead of this exit code.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _end_by_exception() -> None:
    """Let SIGTERM, as of a scheduler, end the program as an exception does: nothing half-written stays behind."""

    def end(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


def _let_go_of_output() -> None:
    """Send what standard output cannot take nowhere, or the interpreter tries once more when it ends, and fails with 120."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    typer.echo(f"kapsi: {' '.join(message.split())}", err=True)
    return 2


def _usage(error: Any, given: Sequence[str]) -> str:
    """Return a usage error as one line, with the nearest right word."""
    message = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    command = getattr(context, "command", None)
    option = re.match(r"No such option:? ['\"]?(-[^\s'\"]*)", message)
    if option and command is not None:
        known = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]
        # Of a long option with one dash, -target, the message has the first letter.
        word = next((word for word in given if word.startswith(option[1])), option[1]).partition("=")[0]
        return f"there is no option {word}; {_hint('-' * (word[:2] != '--') + word, [*known, '--help'])}"
    verb = re.match(r"No such command ['\"](.*?)['\"]", message, re.DOTALL)
    if verb:
        return f"there is no command {verb[1]!r}; {_hint(verb[1], VERBS)}"
    choice = re.search(r"'([^']*)' is not one of ('.*')", message, re.DOTALL)
    if choice:
        close = nearest(choice[1], choice[2].strip("'").split("', '"))
        message = message.replace("Value error, ", "") + (f"; did you mean {close[0]}?" if close else "")
    where = f" (kapsi {command.name} --help shows what there is)" if command is not None and command.name else ""
    return f"{message}{where}"


VERBS = ["fit", "predict", "evaluate", "info", "functions", "data", "reproduce", "parity", "demo"]


def _hint(word: str, known: list[str]) -> str:
    close = [name for name in known if word and name.startswith(word)] or nearest(word, known)
    listed = f"there are {', '.join(known)}"
    return f"did you mean {close[0]}? {listed}" if close else listed
