"""The expression language of masks and scores: its nodes, its texts, its values, and its Triton
source."""
