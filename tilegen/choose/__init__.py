"""Choose kernels and tiles for a problem: the search space, the model's ranking (`ranker`),
measured and agreed configs (`records`), and families. tilegen/pipeline.py joins them."""
