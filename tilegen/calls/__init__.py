"""Public calls: `attention`, for packed sequences and pages, and under other packages' names."""
