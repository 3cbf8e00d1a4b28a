"""Parts of the benchmark `tables.py`: tables, methods, records and pages."""
