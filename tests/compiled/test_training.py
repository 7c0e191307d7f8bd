"""Training of small models with emitted kernels, against eager attention: losses, gradients by
parameter, bits of a repeat, and memory kept for the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

REASON = "needs the package transformers (pip install 'tilegen[integrations]')"
pytest.importorskip("transformers", reason=REASON)

import tilegen  # noqa: E402
from benchmarks.whole.models import Feature  # noqa: E402
from benchmarks.whole.train import MOST_OF_SDPA, compare  # noqa: E402
from benchmarks.whole.training import Case, Training  # noqa: E402

SMALL = Case(model="gpt2-tiny", batch=2, seqlen=70, dtype="fp32")
VARIATIONS: dict[str, tuple[str, set[Feature]]] = {
    "causal": ("gpt2-tiny", set()),
    "documents": ("gpt2-tiny", {"documents"}),
    "checkpoints": ("llama-tiny", {"checkpointing"}),
    "shared keys in a window": ("llama-tiny", {"window"}),
    "both ways": ("bert-tiny", set()),
    "both ways in a window": ("classifier-tiny", {"window"}),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, was = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)  # small steps: threads would wait for each other
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(was)


def _case(name: str, dtype: str) -> Case:
    model, features = VARIATIONS[name]
    seqlen = 300 if "window" in features else 70
    return replace(
        SMALL, model=model, features=frozenset(features), dtype=dtype, seqlen=seqlen, batch=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fifty_losses_deviate_at_most_twice_as_much_as_with_sdpa(dtype: str) -> None:
    rows = compare(replace(SMALL, dtype=dtype), ("sdpa", "tilegen"), "cpu", seeds=2)
    by = {row.attention: row for row in rows}
    assert by["tilegen"].of_sdpa <= MOST_OF_SDPA, by
    assert by["tilegen"].noise <= by["tilegen"].deviation
    assert by["tilegen"].last_loss < 5.3, "it has learned something"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIATIONS)
def test_gradients_of_each_parameter(name: str, dtype: str) -> None:
    """Against fp64, a parameter's gradient errs at most twice as much as with SDPA."""
    case = _case(name, dtype)
    in_fp64 = Training(replace(case, dtype="fp32"), "eager", "cpu")
    in_fp64.model.double()
    exact = in_fp64.gradients()
    theirs, ours = (Training(case, one, "cpu").gradients() for one in ("sdpa", "tilegen"))
    assert ours.keys() == exact.keys()
    for parameter, gradient in exact.items():
        error, allowed = ((one[parameter] - gradient).norm() for one in (ours, theirs))
        # Where SDPA's error is less than a rounding, it is luck.
        rounding = torch.finfo(torch.float32).eps * gradient.norm()
        assert error <= 2 * allowed + rounding, parameter


@pytest.mark.slow
def test_deterministic_training_repeats_bit_for_bit() -> None:
    torch.set_num_threads(2)
    case = replace(_case("documents", "bf16"), batch=2)
    first, second = (Training(case, "tilegen", "cpu", deterministic=True) for _ in range(2))
    assert first.steps(8) == second.steps(8)
    for left, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, other)


@pytest.mark.slow
def test_a_seed_drops_the_same_weights_again() -> None:
    case = replace(SMALL, features=frozenset({"dropout"}))
    first, second = (Training(case, "tilegen", "cpu").steps(3) for _ in range(2))
    other = Training(replace(case, features=frozenset()), "tilegen", "cpu").steps(3)
    assert first == second != other


def test_the_backward_keeps_out_and_lse() -> None:
    """Beside q, k and v, which the model has anyway: batch x heads x seqlen x (dim + 1) numbers."""
    batch, heads, heads_kv, seqlen, dim = 2, 4, 2, 300, 32
    q = torch.randn(batch, heads, seqlen, dim, requires_grad=True)
    k, v = (torch.randn(batch, heads_kv, seqlen, dim, requires_grad=True) for _ in range(2))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, lse = tilegen.attention(q, k, v, mask=tilegen.causal(), return_lse=True)
    given = {x.data_ptr() for x in (q, k, v)}
    beside = {x.data_ptr(): x.nbytes for x in kept if x.data_ptr() not in given}
    assert beside == {out.data_ptr(): out.nbytes, lse.data_ptr(): lse.nbytes}
    assert sum(beside.values()) == 4 * batch * heads * seqlen * (dim + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "documents", "shared keys in a window"])
def test_a_models_layers_keep_nothing_of_the_square(name: str) -> None:
    """No tensor that training keeps is as large as a head's scores; eager attention keeps them."""
    case = replace(_case(name, "fp32"), seqlen=600)
    scores = case.seqlen**2
    most: dict[str, int] = {}
    for attention in ("eager", "tilegen"):
        training = Training(case, attention, "cpu")
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            training.loss(training.batch(0))
        most[attention] = max(sizes)
    assert most["tilegen"] < scores <= most["eager"]
