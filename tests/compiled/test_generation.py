"""Generation by transformers' loops and over a paged cache, with emitted kernels, against eager
attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

REASON = "needs the package transformers (pip install 'tilegen[integrations]')"
pytest.importorskip("transformers", reason=REASON)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.rows import read  # noqa: E402
from benchmarks.whole import generate, paged  # noqa: E402
from benchmarks.whole.generate import Case, Generating  # noqa: E402


def _sharp(case: Case, attention: str) -> Generating:
    """Return a model whose queries look at few keys, as those of trained models do."""
    generating = Generating(case, attention, "cpu")
    with torch.no_grad():
        for name, parameter in generating.model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter *= 12
    return generating


SMALL = Case(model="llama-tiny", way="greedy", prompt=40, new=10, dtype="fp32")


@pytest.mark.slow
@pytest.mark.parametrize("way", generate.WAYS)
def test_tokens_are_those_of_eager_attention(
    way: generate.Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.whole.generate.CHUNK", 16)  # prompts of several chunks
    case = replace(SMALL, way=way)
    expected, ours = (_sharp(case, one).run() for one in ("eager", "tilegen"))
    assert ours.tokens == expected.tokens
    assert [len(one) for one in ours.tokens] == [10] * (4 if way == "paged" else 1)
    assert ours.first_s > 0
    assert ours.per_token_s > 0


@pytest.mark.slow
def test_drafts_are_taken_over_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from what eager attention gave are right, others wrong from the second token on."""
    case = replace(SMALL, way="paged")
    expected = _sharp(case, "eager").run().tokens
    generating = _sharp(case, "tilegen")
    is_right = True

    def draft(self: paged.Request, number: int) -> list[int]:
        request = [len(one) for one in generating.prompts].index(len(self.prompt))
        ahead = expected[request][len(self.tokens) :][:number]
        return ahead if is_right else [*ahead[:1], *((token + 1) % 256 for token in ahead[1:])]

    monkeypatch.setattr(paged.Request, "draft", draft)
    steps: list[int] = []
    for is_right in (True, False):
        served = paged.serve(generating.model, generating.prompts, case.new, chunk=64, drafts=3)
        assert [one.tokens for one in served.requests] == expected
        assert (served.accepted == served.drafted) == is_right
        steps.append(served.steps)
    assert steps[0] < steps[1] < case.new


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_err_at_most_twice_as_much_as_with_sdpa(dtype: str) -> None:
    tokens = _sharp(SMALL, "eager").run().tokens
    in_fp64 = _sharp(SMALL, "eager")
    in_fp64.model.double()
    exact = in_fp64.logits(tokens)
    theirs, ours = (
        np.abs(_sharp(replace(SMALL, dtype=dtype), one).logits(tokens) - exact).max()
        for one in ("sdpa", "tilegen")
    )
    assert 0 < ours <= generate.MOST_OF_SDPA * theirs


@pytest.mark.slow
def test_rows_of_a_case_and_a_run_that_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "generate.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "cases", lambda *, tiny: [SMALL])
        patch.setattr(generate, "ROUNDS", 1)
        for _ in range(2):
            generate.main(out=out, minutes=5.0, tiny=True, threads=1, gib=4.0)
    rows = {row["attention"]: row for row in read(out)}
    assert len(read(out)) == len(rows) == 3
    for row in rows.values():
        assert (row["status"], float(row["same_tokens"])) == ("ok", 1)
        assert float(row["first_ms"]) > 0
    assert float(rows["tilegen"]["per_token_over_tilegen"]) == 1


def test_the_share_of_tokens_before_the_first_that_differs() -> None:
    assert generate.same([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert generate.same([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1
