"""The cost model: bounds, exact traffic, on-chip footprint, time. Loads SymPy."""
