"""An explanation of kernels and tiles: as values (`explanation`), as text and as pictures."""
