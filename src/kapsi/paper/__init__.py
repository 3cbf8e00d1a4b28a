"""The paper's experiments as data, the paper's results, and their reproduction and comparison."""
