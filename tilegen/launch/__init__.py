"""Launch emitted kernels: for a call (`kernels`), with gradients (`autograd`), by the text
that ends an emitted file (`launcher`)."""
