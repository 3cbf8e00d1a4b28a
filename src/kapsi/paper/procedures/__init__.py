"""Procedures: a module for each kind of data, with `read_options(run: Run)` and `run(run: Run) -> Outcome`."""
