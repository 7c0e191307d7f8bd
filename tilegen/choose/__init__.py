"""Kernels and tiles for a problem: the search space, the model's ranking (`ranker`), measured and
agreed configs (`records`), families, and the choice. tilegen/pipeline.py joins them."""
