"""Launch emitted kernels: for a call (`kernels`), with gradients (`autograd`), by generated Python
(`launch_text`)."""
