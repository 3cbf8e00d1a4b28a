"""Data for models: tables from files, their preprocessing, and public and bundled data sets."""
