"""Procedures: a module for each kind of data, with `run(run: Run) -> Outcome`."""
