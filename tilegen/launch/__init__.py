"""Launches of emitted kernels: for one call (`kernels`), with gradients (`autograd`), by one text
(`launch_text`) whatever runs the kernel."""
