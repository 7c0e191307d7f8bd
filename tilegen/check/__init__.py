"""Right results: the meaning of attention (`reference`), the rule (`verification`, `rounding`),
and what PyTorch offers (`peers`)."""
