"""A call at run time: what it asks (`call`), its kernels (`dispatch`), its gradients (`autograd`),
and the other ways to call."""
