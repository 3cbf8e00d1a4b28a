"""The kinds of rows that a model is trained on."""
