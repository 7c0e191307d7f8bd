"""Windows of other libraries against their documentation, pair by pair."""

from collections.abc import Callable

import pytest

from tilegen.errors import InvalidProblem
from tilegen.integrations import windows
from tilegen.masks.mask import Mask, causal, full

LENGTHS = ((6, 6), (4, 6), (6, 4), (1, 6))
Keeps = Callable[[int, int], bool]


def kept(mask: Mask, seqlen_q: int, seqlen_kv: int) -> list[list[bool]]:
    return mask.pairs(seqlen_q, seqlen_kv).tolist()


def said(
    keeps: Keeps, seqlen_q: int, seqlen_kv: int, *, ends_last: bool = True
) -> list[list[bool]]:
    """The pairs that a convention keeps, with queries that end at the last key or start at the
    first."""
    shift = seqlen_kv - seqlen_q if ends_last else 0
    return [[keeps(q + shift, k) for k in range(seqlen_kv)] for q in range(seqlen_q)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [1, 2, 6])
def test_each_library_keeps_the_documented_distances(window: int, lengths: tuple[int, int]) -> None:
    w = window
    conventions: dict[str, tuple[Mask, Keeps]] = {
        "flash-attn": (windows.flash_attn(w, w), lambda q, k: q - w <= k <= q + w),
        "tokens": (windows.flash_attn(w - 1, 0), lambda q, k: k <= q and q - k + 1 <= w),
        "causal wins": (windows.flash_attn(w, w, True), lambda q, k: q - w <= k <= q),
        "left": (windows.flash_attn(w, -1), lambda q, k: q - w <= k),
        "right": (windows.flash_attn(-1, w), lambda q, k: k <= q + w),
        "vllm": (windows.vllm(w), lambda q, k: k <= q < k + w),
        "vllm encoder": (windows.vllm(w, causal=False), lambda q, k: abs(q - k) + 1 <= w),
        "sglang": (windows.sglang(w), lambda q, k: k <= q <= k + w),
    }
    for name, (mask, keeps) in conventions.items():
        assert kept(mask, *lengths) == said(keeps, *lengths), name


@pytest.mark.parametrize("lengths", LENGTHS)
def test_without_a_window(lengths: tuple[int, int]) -> None:
    for mask in (
        windows.flash_attn(-1, -1, True),
        windows.flash_attn(-1, 0),
        windows.flash_attn(None, None, True),
        windows.vllm(None),
        windows.sglang(-1),
        windows.sglang(None),
    ):
        assert mask == causal("bottom_right")
        assert kept(mask, *lengths) == said(lambda q, k: k <= q, *lengths)
    for mask in (
        windows.flash_attn(-1, -1),
        windows.vllm(None, causal=False),
        windows.sdpa(False),
    ):
        assert mask == full()
    first = said(lambda q, k: k <= q, *lengths, ends_last=False)
    assert kept(windows.sdpa(True), *lengths) == first


def test_equal_lengths_share_kernels_with_masks_that_name_no_alignment() -> None:
    assert windows.alignment_of(6, 6) == "top_left"
    assert {windows.alignment_of(*one) for one in ((5, 6), (6, 5))} == {"bottom_right"}
    assert windows.flash_attn(-1, 0, alignment=windows.alignment_of(6, 6)) == causal()


def test_masks_are_made_once() -> None:
    assert windows.flash_attn(7, 0) is windows.flash_attn(7, 0)
    assert windows.vllm(7) is windows.vllm(7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: windows.flash_attn(-2, 0),
        lambda: windows.flash_attn(1.5, 0),  # type: ignore[arg-type]
        lambda: windows.vllm(0),
        lambda: windows.sglang(-2),
    ],
)
def test_invalid_windows_are_refused_in_one_line(make: Callable[[], Mask]) -> None:
    with pytest.raises(InvalidProblem, match=r"^\w+ (must|counts).*; got -?[\d.]+$"):
        make()
