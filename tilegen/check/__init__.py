"""Check results: the definition of attention (`reference`), the rule (`verification`, `rounding`),
and PyTorch's own attention (`peers`)."""
