"""Kernels in Gluon, Triton's lower language, and their proof on machines without a GPU."""
