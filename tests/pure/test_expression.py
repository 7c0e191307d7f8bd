"""Texts of masks and scores: one per expression, read back exactly, and never run."""

from random import Random
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expression_trees import KINDS, T0, T1, T2, condition, score
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.masks.language.nodes import Where, normalise
from tilegen.masks.language.symbols import (
    SEQLEN_KV,
    SEQLEN_Q,
    B,
    H,
    K,
    Lookup,
    Q,
    S,
    captured_name,
    captured_slots,
)
from tilegen.masks.language.texts import (
    MAX_DEPTH,
    MAX_TEXT,
    free_parts,
    from_text,
    kind_of_tensor,
    merge,
    rename,
    to_text,
)

pytestmark = pytest.mark.oldest

TEXTS = {
    "k<=q": K <= Q,
    "(k<=q)&(q-k<16)": (Q >= K) & (Q - K < 16),
    "(h<2)|(k<=q)": sympy.Or(K <= Q, H < 2),
    "~((k<=q)&(q-k<4))": ~((K <= Q) & (Q - K < 4)),
    "(q-k)%4==0": sympy.Eq(sympy.Mod(Q - K, 4), 0),
    "q//64": sympy.floor(Q / 64),
    "(q+32)//64": sympy.floor(Q / 64 + sympy.Rational(1, 2)),
    "q//t1[b]": sympy.floor(Q / Lookup(T1, B)),
    "q*(q+1)//2": None,  # Python's own precedence
    "where(k<=q,s,-inf)": Where(K <= Q, S, -sympy.oo),
    "20.0*tanh(0.05*s)": 20.0 * sympy.tanh(S / 20.0),
    "-(k%4)-(q//3)": -sympy.Mod(K, 4) - sympy.floor(Q / 3),
    "s/3": S / 3,
    "(k-q)*t0[h]+s": S + Lookup(T0, H) * (K - Q),
    "t1[()]<=k": Lookup(T1) <= K,
    "t1[t1[q]]": Lookup(T1, Lookup(T1, Q)),
    "t2[b,q,k]!=0": sympy.Ne(Lookup(T2, B, Q, K), 0),
    "abs(k-q)<=3": abs(Q - K) <= 3,
    "max(0,q-k)": sympy.Max(Q - K, 0),
    "1e-05*sqrt(q+1)": 1e-5 * sympy.sqrt(Q + 1),
    "exp(-s)/s": sympy.exp(-S) / S,
    "sigmoid(s)*log(q+1)": None,
    "0.6931471805599453*2**s": sympy.log(2) * 2**S,
    "s**2": S ** sympy.Float(2.0),
    "q+seqlen_kv-seqlen_q": Q + SEQLEN_KV - SEQLEN_Q,
    "True": sympy.true,
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_usual_expressions(text: str) -> None:
    expr = TEXTS[text]
    read = from_text(text, KINDS)
    if expr is not None:
        assert to_text(expr) == text
        assert read == normalise(expr)
    assert from_text(to_text(read), KINDS) == read


@given(st.randoms(use_true_random=False), st.integers(0, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_random_expressions_are_read_back(random: Random, depth: int, is_mask: bool) -> None:
    expr = (condition if is_mask else score)(random, depth)
    text = to_text(expr)
    assert not any(c.isspace() for c in text)
    read = from_text(text, KINDS)
    assert to_text(read) == text
    assert read == normalise(expr)


HOSTILE = [
    "",
    "k <",
    "__import__('os')",
    "q.__class__",
    "(lambda: q)()",
    "[q for q in k]",
    "exp(s, s)",
    "exp(x=s)",
    "exp(*s)",
    "open(q)",
    "q if k else s",
    "q and k",
    "k<q<s",
    "(k:=q)",
    "'q'",
    "1j*s",
    "None",
    "...",
    "t0",
    "t9[q]",
    "t00[q]",
    "t0[q:k]",
    "t0[0.5]",
    "t0[s]",
    "t0[k<q]",
    "q[k]",
    "n<q",
    "(k<q)+1",
    "k&q",
    "~k",
    "where(k,q,s)",
    "where(k<q,q)",
    "min()",
    "9**9**9**9",
    "2**(10**18)",
    "(10**18)**(10**18)",
    "exp(exp(exp(99)))",
    "exp(10**15)//1",
    "s**99999",
    "1/0",
    "sqrt(-1)",
    "log(0)",
    "inf-inf",
    "inf//1%2",
    "0*inf",
    "s%0",
    "q@k",
    "q<<3",
    "99999999999999999999",
    "+" * 50 + "s",
    "(" * 300 + "s" + ")" * 300,
    "-" * 3000 + "s",
    "~" * 3000 + "(k<q)",
    "exp(" * (MAX_DEPTH + 1) + "s" + ")" * (MAX_DEPTH + 1),
    "s+" * MAX_TEXT + "s",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_hostile_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidProblem, match="expected"):
        from_text(text, KINDS)


@pytest.mark.parametrize("text", ["1/0", "s/0.0", "s+q/(b-b)", "(q%0)+s", "q//(h-h)<=k"])
def test_a_division_by_zero_is_said(text: str) -> None:
    with pytest.raises(InvalidProblem, match=r"division by '.*', which is 0$"):
        from_text(text, KINDS)


def test_long_chains_are_no_nesting() -> None:
    terms = "+".join(f"{i}*t0[h,{i}]" for i in range(2, 300))
    assert len(from_text(terms, KINDS).args) == 298
    keeps = "|".join(f"(q+{i}==2*k)" for i in range(1, 300))
    assert len(from_text(keeps, KINDS).args) == 299


@pytest.mark.parametrize(
    "expr, term",
    [
        (sympy.gamma(S), "gamma"),
        (S + sympy.Symbol("x"), "x"),
        (sympy.Integral(S, (S, 0, Q)) + S, "Integral"),
        (Lookup(T0, S), "t0"),
        (S**200, "200"),
        (sympy.Piecewise((S, K < Q), (0, True)), "Piecewise"),
    ],
    ids=str,
)
def test_what_has_no_text_is_named(expr: Any, term: str) -> None:
    with pytest.raises(Unsupported, match=term):
        to_text(expr)


def test_free_parts() -> None:
    assert free_parts(Lookup(T0, H, Q - K) + S) == {"h", "q", "k"}
    assert free_parts(SEQLEN_Q + B) == {"b"}


def test_captured_tensors_are_renumbered_and_merged() -> None:
    one, two, three = torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    first = Lookup(T0, H) + Lookup(captured_name(1, "float"), Q)
    second = Lookup(T0, K) * Lookup(T1, H)
    merged, captured = merge([(first, (one, two)), (second, (two, three))])
    assert [id(tensor) for tensor in captured] == [id(one), id(two), id(three)]
    assert [to_text(expr) for expr in merged] == ["t0[h]+t1[q]", "t1[k]*t2[h]"]
    assert [kind_of_tensor(one) for one in captured] == ["float", "float", "int"]
    assert captured_slots(merged[1]) == [1, 2]
    unread, kept = merge([(S + Lookup(captured_name(1, "float"), H), (one, two))])
    assert [to_text(expr) for expr in unread] == ["s+t0[h]"]
    assert kept[0] is two


def test_renaming_keeps_what_a_tensor_holds() -> None:
    renamed = rename(Lookup(T1, Q) + Lookup(T2, K), [0, 4, 5])
    assert to_text(renamed) == "t4[q]+t5[k]"
    assert {symbol.name: symbol.is_nonnegative for symbol in renamed.free_symbols} == {
        "t4": None,
        "t5": True,
        "q": True,
        "k": True,
    }


def test_complex_tensors_are_refused() -> None:
    with pytest.raises(TilegenError, match="complex64"):
        kind_of_tensor(torch.zeros(2, dtype=torch.complex64))
