"""The application: commands, exit codes and error messages."""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import inspect
import io
import itertools
import os
import pkgutil
import re
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from kapsi.cli import end
from kapsi.cli.common import begin, discard, note, say
from kapsi.cli.configured import FILE, Config, ConfiguredCommand
from kapsi.cli.data import formula_last
from kapsi.cli.options import as_option
from kapsi.errors import KapsiError, SpecError, line_of, nearest
from kapsi.installed import load_own
from kapsi.version import __version__

app = typer.Typer(
    name="kapsi",
    help="Fit functions with Reconciled Polynomial Networks, y = <kappa(x), psi(w)> + pi(x).",
    epilog="Options also come from environment variables, KAPSI_FIT_FOLDS=5, and from the file of --config. "
    "kapsi --install-completion completes commands, options and choices in bash, zsh, fish and PowerShell.",
    pretty_exceptions_enable=False,
)


def _register() -> list[str]:
    """Register the command of each module, the function named like the module; return the names.

    A module named like a keyword of Python has an underscore more than its command.
    """
    names = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        command = getattr(importlib.import_module(f"kapsi.cli.{module.name}"), module.name, None)
        if inspect.isfunction(command):
            examples = f"Examples:\n{sys.modules[command.__module__].EXAMPLES}"
            name = module.name.removesuffix("_")
            app.command(name, cls=ConfiguredCommand, epilog=examples)(_loading(command))
            names.append(name)
    return names


def _loading(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the catalogue of functions, and torch, loaded before; help and usage errors need neither."""
    at_once = getattr(sys.modules[command.__module__], "at_once", None)

    @functools.wraps(command)
    def loaded(
        *arguments: Any, context: typer.Context | None = None, config: str | None = None, **options: Any
    ) -> None:
        if at_once is not None and (first := at_once(**options)):
            begin(first)
        first_command = "torch" not in sys.modules
        load_own()
        if first_command:
            # Modules stay: collections that visit their million objects take a fifth of the time of a wide table.
            gc.freeze()
        _raise_on_signals()
        try:
            command(*arguments, **options)
        except SpecError as error:
            raise type(error)(as_option(str(error), options, functools.partial(_place, context))) from error

    signature = inspect.signature(command, eval_str=True)
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    loaded.__signature__ = signature.replace(parameters=[*signature.parameters.values(), config, context])  # type: ignore[attr-defined]
    return loaded


def _place(context: typer.Context | None, name: str) -> str:
    """Return where the value of an option is from: empty for the command line, ` in ` and the file of --config or the variable."""
    if context is None:
        return ""
    source = getattr(context.get_parameter_source(name), "name", "")
    variable = next((str(p.envvar) for p in context.command.params if p.name == name), "")
    return {"DEFAULT_MAP": f" in {context.meta.get(FILE)}", "ENVIRONMENT": f" in {variable}"}.get(source, "")


COMMANDS = _register()


def _show_version(show: bool) -> None:
    if show:
        say(f"kapsi {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version.", is_eager=True, callback=_show_version),
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def call(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code, see `kapsi.cli.main`."""
    words = list(arguments)
    for stream in (sys.stdout, sys.stderr):
        # Escape characters beyond the encoding of the stream.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    _interrupted.clear()
    shown, warnings.showwarning = warnings.showwarning, lambda message, *_: note(str(message))
    try:
        return _call(words)
    except Exception:
        if _interrupted:  # an import turned the interrupt into another error
            return 130
        raise
    finally:
        warnings.showwarning = shown


def _call(words: list[str]) -> int:
    try:
        code = app(args=formula_last(words), prog_name="kapsi", standalone_mode=False)
        if sys.stdout is not None:  # closed
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _report(_usage(error, words))
    except KapsiError as error:
        return _report(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # otherwise the interpreter complains at exit
        return 1
    except OSError as error:
        discard(sys.stdout)
        # Errors of other files name the file.
        full = error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG)
        name = f"{error.filename}: " if error.filename else "standard output: " if full else ""
        return _report(f"{name}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search(
            "not enough memory|out of memory|allocate memory", str(error)
        ):
            raise
        return _report("there is not enough memory; use fewer rows or a smaller model (kapsi info shows its size)")


_interrupted: list[int] = []


def _raise_on_signals() -> None:
    """Turn SIGINT and SIGTERM into exceptions, so that unfinished files are removed."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        _interrupted.append(number)
        raise KeyboardInterrupt

    def terminate(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGINT, interrupt), (signal.SIGTERM, terminate)):
            if signal.getsignal(number) in (signal.SIG_DFL, end):
                signal.signal(number, handler)


def _report(message: str) -> int:
    say(f"kapsi: {line_of(' '.join(message.split()))}", err=True)
    return 2


def _usage(error: Any, words: Sequence[str]) -> str:
    """Return a usage error as one line, with a suggestion for a typo."""
    message = error.format_message().strip().rstrip(".")
    context = getattr(error, "ctx", None)
    command = getattr(context, "command", None)
    option = re.match(r"No such option:? ['\"]?(-[^\s'\"]*)", message)
    if option and command is not None:
        known = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]
        # For a long option with one dash, -target, the message has the first letter only.
        word = next((word for word in words if word.startswith(option[1])), option[1]).partition("=")[0]
        return f"there is no option {word}; {_hint('-' * (word[:2] != '--') + word, [*known, '--help'])}"
    command_name = re.match(r"No such command ['\"](.*?)['\"]", message, re.DOTALL)
    if command_name:
        return f"there is no command {command_name[1]!r}; {_hint(command_name[1], COMMANDS)}"
    number = re.match(r"Invalid value for '(--[\w-]+)': Input should be (.*)", message, re.DOTALL)
    if number:
        value = _source(number[1], context, words)[1]
        wanted = re.sub(r"^(greater|less) ", r"a number \1 ", number[2].partition(",")[0])
        message = f"Invalid value for '{number[1]}': {value}, expected {wanted}"
    choice = re.search(r"'([^']*)' is not one of ('.*')", message, re.DOTALL)
    if choice:
        close = nearest(choice[1], choice[2].strip("'").split("', '"))
        message = message.replace("Value error, ", "") + (f"; did you mean {close[0]}?" if close else "")
    given = re.match(r"Invalid value for '(--[\w-]+)'", message)
    if given and command is not None:
        message = message.replace(f"'{given[1]}'", _source(given[1], context, words)[0], 1)
    where = f" (see kapsi {command.name} --help)" if command is not None and command.name else ""
    return f"{message}{where}"


def _source(option: str, context: Any, words: Sequence[str]) -> tuple[str, str]:
    """Return the name of an option with its place, and its value: of the command line, the environment or the file of --config."""
    for value in _values_of(option, words):
        return f"'{option}'", value
    parameter = next(p for p in context.command.params if option in p.opts)
    if parameter.envvar in os.environ:
        return str(parameter.envvar), os.environ[parameter.envvar]
    value = (context.default_map or {}).get(parameter.name, "")
    return f"'{option}'{' in ' + context.meta[FILE] if value else ''}", str(value)


def _values_of(option: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the values of an option on the command line."""
    for word, after in itertools.pairwise([*words, ""]):
        if word == option:
            yield after
        elif word.startswith(f"{option}="):
            yield word.partition("=")[2]


def _hint(word: str, known: list[str]) -> str:
    close = [name for name in known if word and name.startswith(word)] or nearest(word, known)
    listed = f"there are {', '.join(known)}"
    return f"did you mean {close[0]}? {listed}" if close else listed
