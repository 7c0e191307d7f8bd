"""Whole runs of models of transformers: `python -m benchmarks.whole train|generate|summary`."""
