"""The version of tilegen: a module of its own, which anything may read."""

__version__ = "0.1.0"
