"""The command line: thin verbs over the library, one file a verb.

Results go to standard output, notes and progress to standard error. A mistake of the user is one line on standard error
and exit code 2.
"""

from kapsi.cli.app import main, run

__all__ = ["main", "run"]
