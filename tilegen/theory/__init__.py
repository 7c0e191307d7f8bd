"""Theorems of the papers, derived: schedules, their best tiles, regimes and patterns. Reports use
them, calls do not."""
