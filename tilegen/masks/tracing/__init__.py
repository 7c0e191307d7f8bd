"""Tracing: expressions of Python functions, as FlexAttention takes them."""
