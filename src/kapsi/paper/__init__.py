"""The experiments of the paper as data, the numbers that it prints, and what runs and compares them."""
