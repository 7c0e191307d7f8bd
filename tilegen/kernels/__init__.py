"""The emitted kernels: what there is, and the knobs of each."""
