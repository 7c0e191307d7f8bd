"""The parts of `python -m benchmarks.io_study`: tiles, counting, tables, figures."""
