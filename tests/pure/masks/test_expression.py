"""Texts of masks and scores: one per expression, read back exactly, and never run."""

import pickle
from copy import deepcopy
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.expression_trees import KINDS, condition, score, t0, t1, t2
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks import score as scores
from tilegen.masks.language.algebra import (
    as_expr,
    equal,
    load,
    maximum,
    multiply,
    real,
    where,
)
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import (
    SEQLEN_KV,
    SEQLEN_Q,
    TRUE,
    B,
    H,
    K,
    Q,
    S,
    captured_slots,
)
from tilegen.masks.language.functions import elementary, power
from tilegen.masks.language.rewriting import free_parts, merge, rename
from tilegen.masks.language.texts import MAX_DEPTH, MAX_TEXT, from_text, to_text
from tilegen.masks.values import table_of

pytestmark = pytest.mark.oldest

ZERO = torch.tensor(0)
TEXTS = {
    "k<=q": K <= Q,
    "(k<=q)&(q-k<16)": (Q >= K) & (Q - K < 16),
    "(h<2)|(k<=q)": (K <= Q) | (H < 2),
    "~((k<=q)&(q-k<4))": ~((K <= Q) & (Q - K < 4)),
    "(q-k)%4==0": equal((Q - K) % 4, 0),
    "q//64": Q // 64,
    "(q+32)//64": (Q + 32) // 64,
    "q//t1[b]": Q // t1(B),
    "((q+1)*q)//2": Q * (Q + 1) // 2,
    "where(k<=q,s,-inf)": where(K <= Q, S, -float("inf")),
    "20.0*tanh(0.05*s)": multiply(20.0, elementary("tanh", 0.05 * S)),
    "-(k%4)-(q//3)": -(K % 4) - Q // 3,
    "s/3.0": S / 3,
    "0.25*s": S / 4.0,
    "(k-q)*t0[h]+s": S + t0(H) * (K - Q),
    "q+s-k": S + Q - K,
    "(k-q)+s": S - (Q - K),
    "float32(k)*q": multiply(as_expr(1.0) * Q, real(K)),
    "t1[()]<=k": load(1, "int") <= K,
    "t1[t1[q]]": t1(t1(Q)),
    "t2[b,q,k]!=0": ~equal(t2(B, Q, K), 0),
    "abs(k-q)<=3": abs(Q - K) <= 3,
    "max(0,q-k)": maximum(Q - K, 0),
    "1e-05*sqrt(q+1)": multiply(1e-5, elementary("sqrt", Q + 1)),
    "exp(-s)/s": elementary("exp", -S) / S,
    "log(q+1)*sigmoid(s)": None,
    "0.5*2.0**s": multiply(0.5, power(2.0, S)),
    "s**2": S**2,
    "q+seqlen_kv-seqlen_q": Q + SEQLEN_KV - SEQLEN_Q,
    "int8(3*t1[q])<k": None,
    "float64(s)<float64(0.1)": None,
    "float16(s)": None,
    "int64(0.3*q)": None,
    "~(sqrt(500.0-q)<k)": None,
    "t0[h]!=s": None,
    "True": TRUE,
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_usual_expressions(text: str) -> None:
    expr = TEXTS[text]
    read = from_text(text, KINDS)
    if expr is not None:
        assert to_text(expr) == text
        assert read is expr
    assert to_text(read) == text
    assert from_text(to_text(read), KINDS) is read


@given(st.randoms(use_true_random=False), st.integers(0, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_random_expressions_are_read_back(random: Random, depth: int, is_mask: bool) -> None:
    expr = (condition if is_mask else score)(random, depth)
    text = to_text(expr)
    assert not any(c.isspace() for c in text)
    read = from_text(text, KINDS)
    assert to_text(read) == text
    assert read is expr or real(read) is expr  # an integer alone is a score, too


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
    "s**99999",
    "1/0",
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


def test_nan_is_as_in_pytorch() -> None:
    for text in ("inf-inf", "0*inf", "sqrt(-1)", "inf%2"):
        actual = evaluate(from_text(f"s+({text})"), (), b=0, h=0, q=ZERO, k=ZERO, s=ZERO * 1.0,
                         seqlen_q=1, seqlen_kv=1)  # fmt: skip
        assert actual.isnan(), text


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
    assert len(from_text(terms, KINDS).loads()) == 298
    keeps = "|".join(f"(q+{i}==2*k)" for i in range(1, 300))
    assert len(from_text(keeps, KINDS).args) == 299


OLDER = {
    "q/2<=k": "q<=2*k",
    "t2[q]==0": "t2[q]==0",
    "less(s,t0[h])": "s<t0[h]",
    "~lessequal(t0[h],s)": "~(t0[h]<=s)",
    "same(t0[q],t0[k])": "t0[k]==t0[q]",
    "(q<3)&(q>=3)": "False",
    "k<k+1": "True",
    "~(k<q)": "q<=k",
}


@pytest.mark.parametrize("text", OLDER)
def test_other_spellings_are_read(text: str) -> None:
    """Texts of records that older releases have written, among them."""
    assert to_text(from_text(text, KINDS)) == OLDER[text]


def test_equal_expressions_are_one_object() -> None:
    assert Q + K - Q is K
    assert (Q + K) * 2 is K * 2 + Q * 2
    assert pickle.loads(pickle.dumps(Q * K + 1)) is Q * K + 1
    assert deepcopy(Q + 1) is Q + 1
    assert multiply(0.1, S) is not multiply(-0.1, S)
    with pytest.raises(AttributeError, match="do not change"):
        Q.op = "load"  # type: ignore[misc]
    with pytest.raises(TypeError, match="neither true nor false: k<=q"):
        bool(K <= Q)


def test_floats_keep_their_order() -> None:
    """Sums that are rounded differently are different expressions."""
    assert to_text((S + 0.1) + t0(H)) == "s+0.1+t0[h]"
    assert to_text(S + (t0(H) + 0.1)) == "t0[h]+0.1+s"
    assert (S + 0.1) + t0(H) is not S + (t0(H) + 0.1)
    assert S * 0.5 * 2.0 is S


def test_free_parts() -> None:
    assert free_parts(t0(H, Q - K) + S) == {"h", "q", "k"}
    assert free_parts(SEQLEN_Q + B) == {"b"}


def test_captured_tensors_are_renumbered_and_merged() -> None:
    tensors = torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    left, two, three = map(table_of, tensors)
    first = t0(H) + load(1, "float", Q)
    second = t0(K) * t1(H)
    again = table_of(tensors[1], "h")
    merged, captured = merge([(first, (left, two)), (second, (again, three))])
    assert captured == (left, again, three)
    assert [to_text(expr) for expr in merged] == ["t0[h]+t1[q]", "t2[h]*t1[k]"]
    assert [one.kind for one in captured] == ["float", "float", "int"]
    assert captured_slots(merged[1]) == [1, 2]
    unread, kept = merge([(S + load(1, "float", H), (left, two))])
    assert [to_text(expr) for expr in unread] == ["s+t0[h]"]
    assert kept == (two,)
    other = table_of(tensors[1], "q")  # another size must be checked
    assert merge([(t0(H), (again,)), (t0(Q), (other,))])[1] == (again, other)


def test_renaming_keeps_the_elements_of_a_tensor() -> None:
    renamed = rename(t1(Q) + t2(K), [0, 4, 5])
    assert to_text(renamed) == "t4[q]+t5[k]"
    assert {one.value for one in renamed.loads()} == {(4, "int"), (5, "bool")}


def test_complex_tensors_are_refused() -> None:
    numbers = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(Unsupported, match="complex64"):
        scores.score(lambda s, b, h, q, k: s + numbers[h])
