"""The operators `tilegen::forward` and `tilegen::backward`, for programs that were exported.

Graphs of torch.export and AOTInductor name the operators and nothing else of tilegen: whoever loads
one imports this module first. Calls of `attention` load it by themselves where they need it.
"""

from tilegen.runtime.operators.library import backward, forward

__all__ = ["backward", "forward"]
