"""A forward in Gluon, Triton's lower language, and its proof on machines without a GPU."""
