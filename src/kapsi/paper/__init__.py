"""The paper's experiments as data, its printed numbers, and their reproduction and comparison."""
