"""Derivations from the theorems of the papers: schedules, their best tiles, regimes and patterns.
Reports use them; calls do not."""
