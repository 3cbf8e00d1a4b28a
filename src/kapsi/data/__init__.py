"""Data for models: tables from files, their preprocessing, and the bundled data set."""
