"""Interfaces of other libraries, computed by tilegen's kernels. Importing this package imports none
of the libraries; each module imports the library that it is for."""
