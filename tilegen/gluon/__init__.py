"""Kernels in Gluon, Triton's lower language: rendered, compiled, and run in the memory model."""
