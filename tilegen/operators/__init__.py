"""The operators tilegen::forward, tilegen::backward, tilegen::paged and tilegen::append, for
programs that were exported.

Graphs of torch.export and AOTInductor name the operators and nothing else of tilegen: whoever loads
one imports this module first. Calls of `attention` and of its paged kin load it by themselves where
they need it.
"""

from tilegen.operators.library import backward, forward
from tilegen.operators.pages import append_operator as append
from tilegen.operators.pages import paged

__all__ = ["append", "backward", "forward", "paged"]
