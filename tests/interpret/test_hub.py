"""A bundle laid out for the package `kernels`, which loads it without the hub; Triton's interpreter
runs what it brings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REASON = "needs the package kernels (pip install 'tilegen[integrations]')"
kernels = pytest.importorskip("kernels", reason=REASON)

from tests.support.bundles import write_bundle  # noqa: E402
from tilegen.check.reference import attention_reference  # noqa: E402
from tilegen.errors import InvalidProblem, Unsupported  # noqa: E402
from tilegen.gpus.spec import gpu  # noqa: E402
from tilegen.integrations.hub import lay_out  # noqa: E402
from tilegen.masks.mask import causal, sliding_window  # noqa: E402
from tilegen.masks.score import softcap  # noqa: E402
from tilegen.problem import AttentionProblem  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PROBLEMS = (
    "b1 hq4 hkv2 q64 d16 fp32 causal",
    "b1 hq4 hkv2 q64 d16 fp32 window(7,0,bottom_right)",
    "b1 hq4 hkv4 q64 d16 fp32 score(2.0*tanh(0.5*s))",
)
TOLERANCE = 64 * torch.finfo(torch.float32).eps


def repository(out: Path, problems: tuple[str, ...], **options: Any) -> Path:
    parsed = [AttentionProblem.parse(one) for one in problems]
    write_bundle(parsed, [gpu("h200")], out / "bundle", **options)
    return lay_out(out / "bundle", out / "repository", backends=["cpu"])


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kernels.get_local_kernel(repository(tmp_path_factory.mktemp("hub"), PROBLEMS))


def qkv(heads_kv: int, seqlen_q: int = 33, seqlen_kv: int = 41) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, length, 16, generator=generator).requires_grad_()
        for heads, length in ((4, seqlen_q), (heads_kv, seqlen_kv), (heads_kv, seqlen_kv))
    ]


CALLS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "causal": (2, {"mask": "causal"}, {"mask": causal()}),
    "window": (
        2,
        {"mask": "window(7,0,bottom_right)", "scale": -0.2},
        {"mask": sliding_window(7, 0, "bottom_right"), "scale": -0.2},
    ),
    "soft cap": (4, {"softcap": 2.0}, {"score": softcap(2.0)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_out_lse_and_gradients(module: Any, name: str) -> None:
    heads_kv, asked, meant = CALLS[name]
    results: list[list[torch.Tensor]] = []
    for ours in (True, False):
        q, k, v = qkv(heads_kv)
        out, lse = (
            module.attention(q, k, v, **asked, return_lse=True)
            if ours
            else attention_reference(*(one.double() for one in (q, k, v)), **meant)
        )
        (out.square().sum() + lse.sum()).backward()
        results.append([out.detach(), lse.detach(), q.grad, k.grad, v.grad])
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).abs().max() <= TOLERANCE * exact.abs().max()


def test_names_of_flash_attention(module: Any) -> None:
    q, k, v = (one.detach() for one in qkv(2, 33, 33))
    expected, _ = attention_reference(q, k, v, mask=causal())
    swapped = [one.transpose(1, 2).contiguous() for one in (q, k, v)]
    out = module.flash_attn_func(*swapped, causal=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    k, v = (one.detach() for one in qkv(2)[1:])
    expected, _ = attention_reference(q, k, v, mask=sliding_window(7, 0, "bottom_right"))
    swapped = [one.transpose(1, 2).contiguous() for one in (q, k, v)]
    out = module.flash_attn_func(*swapped, window_size=(7, 0))
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_tensors_that_kernels_cannot_address_are_copied(module: Any) -> None:
    q, k, v = (one.detach() for one in qkv(2))
    expected = module.attention(q, k, v, mask="causal")
    odd = torch.zeros(q.numel() + 1)[1:].view(q.shape).copy_(q)  # at an odd address
    columns = k.mT.contiguous().mT  # rows are not dense
    assert torch.equal(module.attention(odd, columns, v, mask="causal"), expected)


def test_problems_outside_the_table_are_refused_in_one_line(module: Any) -> None:
    q, k, v = (one.detach() for one in qkv(2))
    with pytest.raises(ValueError, match=r"one of the 3 problems in table\.json.*mask full"):
        module.attention(q, k, v)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        module.attention(q.double(), k.double(), v.double(), mask="causal")
    with pytest.raises(ValueError, match="no dropout"):
        module.flash_attn_func(q, k, v, dropout_p=0.1)
    assert module.problems()[0].startswith("sm_90: ")


def test_the_module_needs_no_tilegen(module: Any, tmp_path: Path) -> None:
    folder = Path(module.__file__).parent
    for file in folder.rglob("*.py"):
        text = file.read_text()
        assert "import tilegen" not in text
        assert "from tilegen" not in text
    assert module.__name__ in sys.modules
    other = kernels.get_local_kernel(repository(tmp_path, PROBLEMS[:1]))
    assert other.__name__ != module.__name__


def test_a_forward_alone_says_so_when_gradients_are_wanted(tmp_path: Path) -> None:
    path = repository(tmp_path, PROBLEMS[:1], directions=["forward"])
    module = kernels.get_local_kernel(path)
    q, k, v = qkv(2)
    with pytest.raises(ValueError, match="has no backward kernels here"):
        module.attention(q, k, v, mask="causal")
    with torch.no_grad():
        assert module.attention(q, k, v, mask="causal").shape == q.shape


@pytest.mark.parametrize(
    "problem",
    [
        "b1 hq4 hkv2 q64 d16 fp32 causal&kv_prefix(@b:64)",
        "b1 hq4 hkv2 q64 d16 fp32 neighborhood(8x8,3x3)",
        "b1 hq4 hkv2 q64 d16 fp32 causal score(s,sinks)",
        "b1 hq4 hkv2 q64 d16 fp32 causal score(2.0*s)",
        "b1 hq4 hkv2 q64 d16 fp32 causal dropout",
        "b1 hq2 hkv1 q40 d512 fp32 causal",
    ],
)
def test_problems_that_need_tilegen_are_refused(problem: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="leave it out of the catalogue"):
        repository(tmp_path, (problem,))


def test_names_are_those_that_kernels_takes(tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="lower-case words"):
        lay_out(tmp_path, tmp_path, name="Not_A_Name")
