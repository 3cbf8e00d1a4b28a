"""`python -m kapsi`."""

import sys

from kapsi.cli import main

if __name__ == "__main__":
    sys.exit(main())
