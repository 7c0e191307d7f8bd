"""The names of other libraries, with tilegen's kernels behind them. Importing this imports none of
them: each module imports the package that it is for."""
