"""`python -m kapsi`."""

from kapsi.cli import run

if __name__ == "__main__":
    run()
