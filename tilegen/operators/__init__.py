"""The operators tilegen::forward, tilegen::backward, tilegen::paged and tilegen::append.

Import this module before loading a graph that torch.export or AOTInductor saved: such a graph
refers to the operators and to nothing else of tilegen. Calls of `attention`, `attention_paged` and
`append_paged` import it where they need it.
"""

from tilegen.operators.library import backward, forward
from tilegen.operators.pages import append_operator as append
from tilegen.operators.pages import paged

__all__ = ["append", "backward", "forward", "paged"]
