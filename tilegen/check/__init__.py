"""Right results: the meaning of attention (`reference`), the rule (`verification`, `rounding`),
Triton in the interpreter (`interpreter`), and what PyTorch offers (`peers`)."""
