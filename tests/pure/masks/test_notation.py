"""Notations of masks: any unreadable text gives one InvalidProblem and runs nothing."""

from __future__ import annotations

import builtins
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks import notation, parse_mask
from tilegen.masks.tiles.tile_ranges import tile_ranges

HOSTILE = [
    "", " ", "()", "((", "))", "~", "~~~", "&", "|", "causal&&causal", "causal|", "(causal",
    "causal)", "[causal]", "{causal}", "causal()", "causal(())", "full(1)", "causal#", "None",
    "causal\x00", "1if", "window('3',0)", "window(3x3,0)", "window(causal,0)", "import os",
    "window(,)", "window(1,)", "window(0x10,0)",
    "window(1e3,0)", "window(+5,0)", "window(--5,0)", "window(1_0,0)", "window(-2,0)",
    "window(9999999999999,0)", "window(999999999999,0)", "window[1,2]", "dilated(0)",
    "dilated(-1)", "dilated(@h:2)", "global(-1)", "prefix_lm(-5)", "prefix_lm(@)", "prefix_lm(@h)",
    "prefix_lm(@hb:3)", "prefix_lm(@bhqk:3)", "prefix_lm(@h:-3)", "prefix_lm(@h:9999999999)",
    "neighborhood(4,4)", "neighborhood(0,1)", "neighborhood(3x3,3)", "neighborhood(x,x)",
    "neighborhood(1x1x1x1,1x1x1x1)", "documents()", "documents(5)", "documents(@:5)",
    "documents(@b:5)", "documents(@k:5)", "documents(@qk:5)", "same_id(@:1,@:1)",
    "same_id(@k:1,@q:1)", "same_id(@b:1,@h:1)", "block_sparse(@:50)", "block_sparse(50,16)",
    "block_sparse(@:50,0)", "block_sparse(@:50,-4)", "block_sparse(@:500,16)",
    "tree()", "tree(64)", "tree(@q:64)", "tree(@:0)", "tree(@:64,@q:3)", "tree(@:99999)",
    "block_sparse(@q:50,16)", "block_sparse(@:50,99999999999)", "within(causal,causal)",
    "within(same_id(@q:4,@k:4))", "within(same_id(@q:4,@k:4),nothing)",
    "within(same_id(@q:4,@k:4),within(same_id(@q:4,@k:4),causal))", "keep()", "keep(,)", "keep(q)",
    "keep(1)", "keep(t0)", "keep(s<0)", "keep(q<k,)", "keep(q<k,@:5)", "keep(q<k,@:5str)",
    "keep(t0[q]<k)", "keep(t1[q]<k,@:50int)", "keep(t0[q,k],@:50int)", "keep(t0[q][k]<1,@:50int)",
    "keep(t99999999999999999999[q]<1,@:50int)", "keep(q<k<q)", "keep(q and k)", "keep(not q<k)",
    "keep([q<k])", "keep(q<k if 1 else 0)", "keep(q<k;1)", "keep(q\n<k)", "keep(q//0<k)",
    "keep(q%0<k)", "keep(1//0<q)", "keep(9**9**9<k)", "keep(q.__class__)",
    "keep((lambda:1)())", "keep(__import__('os').system('true'))", "keep(open('x')<q)",
    "keep(q<" + "(" * 250 + "k" + ")" * 250 + ")", "keep(" + "~" * 500 + "(q<k))",
    "(" * 250 + "causal" + ")" * 250, "~" * 40 + "causal", "(" * 10_000, ")" * 10_000,
    "causal" + "&causal" * 5_000, "&".join(f"window({i},0)" for i in range(3_000)),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:40])
def test_hostile_text_gets_one_clear_error(text: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        parse_mask(text)
    message = str(caught.value)
    assert any(word in message for word in ("expected", " must be ", " needs "))
    assert len(message) < 1000
    assert "\n" not in message


@pytest.mark.parametrize("what", [None, 5, b"causal", ["causal"]], ids=str)
def test_only_text_is_read(what: Any) -> None:
    with pytest.raises(InvalidProblem, match="expected the notation of a mask, got"):
        parse_mask(what)


def test_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_mask("keep(k<=q)")  # imports run their modules
    ran: list[str] = []
    for module, name in ((builtins, "eval"), (builtins, "exec"), (os, "system")):
        monkeypatch.setattr(module, name, lambda *what: ran.append(str(what)))
    for text in HOSTILE:
        if "keep" in text:
            with pytest.raises(InvalidProblem):
                parse_mask(text)
    parse_mask("keep(k<=q)")
    assert not ran


PIECES = [
    *"()&|~,@:[]<>=+-*/% \n", "causal", "full", "window", "global", "prefix_lm", "kv_prefix",
    "dilated", "documents", "same_id", "block_sparse", "neighborhood", "within", "keep", "q", "k",
    "b", "h", "t0", "1", "0", "16", "-1", "@h:4", "@q:4", "@k:4", "@:50", "3x3", "bottom_right",
    "int", "(1,2)", "(@q:4)", "(@:50,16)", "(@h:4,0)", "seqlen_q", "//", "**", "1e9", "__", "\x00",
    "²", "x",
]  # fmt: skip


@settings(
    max_examples=750,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join) | st.text(max_size=12))
@example("keep(k<=q)")
@example("block_sparse(@:50,16)&same_id(@q:4,@k:4)")
def test_whatever_is_read_is_a_mask(text: str) -> None:
    """Its notation is read back as itself, without white space, and its tiles can be counted."""
    try:
        mask = parse_mask(text)
    except InvalidProblem:
        return
    assert parse_mask(mask.notation) == mask
    assert not any(character.isspace() for character in mask.notation)
    try:
        ranges = tile_ranges(mask, "rows", seqlen_q=9, seqlen_kv=9, block_m=4, block_n=4)
    except Unsupported:
        return
    assert ranges.full_tiles <= ranges.visited_tiles <= 9


@pytest.mark.parametrize(
    "text, canonical",
    [
        (" causal | full ", "full"),
        ("causal&\tcausal", "causal"),
        ("window(-1,-1)", "full"),
        ("((causal))", "causal"),
        ("~~causal", "causal"),
        ("keep( (q) >= k*k )", "keep(k**2<=q)"),
        ("window( 3 , @h:8 )", "window(3,@h:8)"),
        ("keep(t0[()] >= k, @:50int)", "keep(k<=t0[()],@:50int)"),
        (
            "unlisted(block_sparse(@bh:50,16) & global(5))",
            "unlisted(block_sparse(@bh:50,16)&global(5))",
        ),
        (
            "within(same_id(@q:4,@k:4), ~window(3,0)|kv_prefix(9))",
            "within(same_id(@q:4,@k:4),kv_prefix(9)|~window(3,0))",
        ),
        ("neighborhood( 3x4x5 , 1x3x5 )", "neighborhood(3x4x5,1x3x5)"),
    ],
)
def test_many_spellings_have_one_notation(text: str, canonical: str) -> None:
    assert parse_mask(text).notation == canonical


def test_every_form_is_named_in_the_error() -> None:
    for name in (one.rstrip("_") for one in notation.CONSTRUCTORS):
        assert f"{name}(" in notation.FORMS or f"{name}," in notation.FORMS
