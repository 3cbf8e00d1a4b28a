"""Training: the engine, and the fitting of tables into run folders."""
