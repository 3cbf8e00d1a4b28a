"""The command line: thin commands over the library, one file per command.

Results go to standard output, notes and progress to standard error. A user error is one line on standard error
and exit code 2.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import types
from collections.abc import Sequence

__all__ = ["main", "run"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for a user error, 130 after an interrupt.

    Args:
        arguments: command-line arguments without the program name, by default `sys.argv[1:]`.
    """
    from kapsi.cli.app import call

    return call(sys.argv[1:] if arguments is None else arguments)


def run() -> None:
    """Run the command line and end the process: the entry point."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    _open_closed_streams()
    code = main()
    if code == 130:
        # After an interrupt during an import, the process could end by the signal instead of the exit code.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def end(number: int, frame: types.FrameType | None) -> None:
    """End the process at once by a signal: nothing is to be cleaned up while modules are imported."""
    os._exit(128 + number)


def _open_closed_streams() -> None:
    """Open closed standard streams on the null device: the next opened file would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115
