"""From Python functions, as FlexAttention takes them, to expressions."""
