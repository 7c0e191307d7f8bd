"""Windows and causal alignments of other libraries as masks. The conventions of each library are
implemented only here.

Masks are cached: calls with the same window get the same object.
"""

from __future__ import annotations

from tilegen.errors import InvalidProblem
from tilegen.masks.made import made_once
from tilegen.masks.mask import Mask, causal, full, sliding_window
from tilegen.masks.values import Alignment


def alignment_of(seqlen_q: int, seqlen_kv: int) -> Alignment:
    """Return the alignment for libraries whose masks are aligned to the last query and key.

    At equal lengths both alignments are the same mask. "top_left" then shares kernels and records
    with calls that name no alignment.
    """
    return "top_left" if seqlen_q == seqlen_kv else "bottom_right"


@made_once
def sdpa(is_causal: bool) -> Mask:
    """Return the mask of SDPA's `is_causal`: `k <= q`, from the top left corner at any lengths."""
    return causal("top_left") if is_causal else full()


@made_once
def flash_attn(
    left: int | None,
    right: int | None,
    causal: bool = False,
    alignment: Alignment = "bottom_right",
) -> Mask:
    """Return the mask of flash-attn's `window_size=(left, right)` and `causal`, which torch's
    `varlen_attn` shares.

    Both sides are kept distances, -1 or None for unbounded; `causal` sets `right` to 0.
    """
    left, right = (_distance("window_size", side) for side in (left, right))
    return _window(left, 0 if causal else right, alignment)


@made_once
def vllm(window: int | None, causal: bool = True, alignment: Alignment = "bottom_right") -> Mask:
    """Return the mask of vLLM's `sliding_window`: that many tokens, including the query's own, on
    both sides if a model is not causal; None is unbounded."""
    if window is not None and (isinstance(window, bool) or window < 1):
        raise InvalidProblem(
            "sliding_window counts the query's own token and must be 1 or more, or None for "
            f"unbounded; got {window!r}"
        )
    others = None if window is None else window - 1
    return _window(others, 0 if causal else others, alignment)


@made_once
def sglang(window: int | None, alignment: Alignment = "bottom_right") -> Mask:
    """Return the causal mask of sglang's `sliding_window_size`: a kept distance, -1 or None for
    unbounded."""
    return _window(_distance("sliding_window_size", window), 0, alignment)


def _window(left: int | None, right: int | None, alignment: Alignment) -> Mask:
    """Return the mask of kept distances, None for unbounded."""
    if left is None and right == 0:
        return causal(alignment)
    return sliding_window(left, right, alignment)


def _distance(name: str, value: int | None) -> int | None:
    """Return a distance; None for unbounded. Raises InvalidProblem."""
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidProblem(
            f"{name} must hold distances of 0 or more, or -1 for unbounded; got {value!r}"
        )
    return value
