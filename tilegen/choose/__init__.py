"""Kernels and tiles for a problem: ranked by the model (`ranking`), by family (`families`), alike
on all ranks (`agreement`)."""
