"""Whole runs of models: training, generation, memory and block-sparse time, beside PyTorch's."""
