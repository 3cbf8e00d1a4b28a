"""How the runs of an experiment are done: one module a kind of data, each with `run(run: Run) -> Outcome`."""
