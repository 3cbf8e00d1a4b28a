"""The command line: thin commands over the library, one file per command.

Results go to standard output, notes and progress to standard error. A user error is one line on standard error
and exit code 2.
"""

from kapsi.cli.app import main, run

__all__ = ["main", "run"]
