"""The cost model: bounds, exact traffic, on-chip footprint and time. Loads SymPy."""
