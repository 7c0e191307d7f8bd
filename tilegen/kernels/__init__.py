"""Records of the emitted kernels and their families, with the knobs of each."""
