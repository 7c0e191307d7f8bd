"""Benchmarks: one workload catalogue, one driver, one CSV per GPU and date."""
