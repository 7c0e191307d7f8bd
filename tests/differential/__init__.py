"""Random problems through the emitted kernels, compiled for the CPU, against PyTorch in fp64.

    python -m tests.differential --seed 1 --minutes 60 --out found.jsonl

Problem number i of a seed is a function of both alone: ranges are resumed and run side by side.
"""
