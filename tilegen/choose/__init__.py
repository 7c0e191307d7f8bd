"""Kernels and tiles for a problem: ranked by the model (`ranking`), by family (`families`), known
from records (`known`), alike on all ranks (`agreement`). tilegen/pipeline.py joins them."""
