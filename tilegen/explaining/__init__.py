"""Explain kernels and tiles: as values (`explanation`), as text (`text`) and as plots (`plot`)."""
