"""Operations on elements against PyTorch: on special values, at the ends of ranges, between."""

import math

import pytest
import torch

from tests.compiler import kernels
from tests.compiler.runs import TARGETS, launch
from tilegen.cpu.target import Target

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 2.0**-149, 2.0**-126]
SPECIAL += [3.4e38, -3.4e38, 127.99, 128.0, -126.0, -127.5, -148.7, -149.0, -150.5, 88.7, -103.9]
SPECIAL += [math.sqrt(0.5), math.sqrt(2.0), 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1e-40, 7e-43]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def _inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(2000, generator=generator)
    return torch.cat([torch.tensor(SPECIAL), random, 40 * random, random.abs() * 1e-38, 2**random])


def _unary(x: torch.Tensor, what: str, target: Target, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    launch(kernels.unary, (-(-len(x) // 64),), x, out, len(x), what, 64, target=target)
    return out


@pytest.mark.parametrize("what", ["exp2", "exp", "log2", "log", "sqrt", "floor", "abs", "erf"])
def test_functions_of_fp32(what: str, target: Target) -> None:
    """Within 2 units in the last place of the fp64 value; NaN and infinities exactly."""
    x = _inputs()
    expected = getattr(torch, what)(x.double())
    actual = _unary(x, what, target, torch.float32).double()
    rounded = expected.float().double()
    assert torch.equal(actual.isnan(), rounded.isnan())
    finite = rounded.isfinite() & actual.isfinite()
    assert torch.equal(actual[~finite & ~actual.isnan()], rounded[~finite & ~actual.isnan()])
    unit = torch.where(rounded == 0, 0, rounded).abs().clamp_min(2.0**-126) * 2.0**-23
    worst = ((actual - expected)[finite].abs() / unit[finite]).max()
    assert worst <= 2.0, f"{float(worst):.2f} units in the last place"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_floats_round_as_in_pytorch(dtype: torch.dtype, target: Target) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(dtype)
    assert _same_bits(_unary(every, "copy", target, torch.float32), every.float())
    x = torch.cat([every.float(), _inputs(), every.float() * (1 + 2.0**-9), every.float() * 1.5])
    # Half way between two neighbours, and a little beside it.
    between = (every[:-1].float() + every[1:].float()) / 2
    x = torch.cat([x, between, between * (1 + 2.0**-22), between * (1 - 2.0**-22)])
    # NaN whose rounding up would carry into the sign.
    x = torch.cat([x, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    assert _same_bits(_unary(x, "copy", target, dtype), x.to(dtype))


@pytest.mark.parametrize(
    "value, dtype",
    [
        *((-3.4028234663852886e38, torch.float32), (1e-40, torch.float32), (0.1, torch.float32)),
        *((0.1, torch.float16), (65504.0, torch.float16), (2.0**-24, torch.float16)),
        *((0.1, torch.bfloat16), (math.inf, torch.bfloat16), (-3.38e38, torch.bfloat16)),
    ],
    ids=str,
)
def test_constants_are_numbers_of_their_type(
    value: float, dtype: torch.dtype, target: Target
) -> None:
    """Decimals in TTIR name the nearest number of their type, and need not be equal to it."""
    out = torch.empty(16)
    launch(kernels.filled, (1,), torch.zeros(16, dtype=dtype), out, value, 16, target=target)
    assert _same_bits(out, torch.full_like(out, value).to(dtype).float())


def _same_bits(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare bits, but for the payload of NaN."""
    whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    nan = expected.isnan()
    same = torch.equal(tensor.view(whole)[~nan], expected.view(whole)[~nan])
    return same and torch.equal(tensor.isnan(), nan)


@pytest.mark.parametrize("what", ["max", "max_nan", "min", "min_nan"])
def test_extremes_of_floats(what: str, target: Target) -> None:
    x = torch.tensor(SPECIAL)
    a, b = x.repeat(len(x)), x.repeat_interleave(len(x))
    out = torch.empty_like(a)
    launch(kernels.binary, (-(-len(a) // 64),), a, b, out, len(a), what, 64, target=target)
    names = {"max": "fmax", "max_nan": "maximum", "min": "fmin", "min_nan": "minimum"}
    expected = getattr(torch, names[what])(a, b)
    assert torch.equal(out.nan_to_num(nan=9e9), expected.nan_to_num(nan=9e9))


@pytest.mark.parametrize("what", ["quotient", "remainder", "high", "add", "mul", "least"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers(what: str, dtype: torch.dtype, target: Target) -> None:
    """As Triton has them: divisions round towards 0. Where a processor would trap, x // 0 is x."""
    limits = torch.iinfo(dtype)
    values = [0, 1, -1, 2, 7, -7, 100, limits.max, limits.min, limits.max - 1, 12345, -54321]
    x = torch.tensor(values, dtype=dtype)
    a, b = x.repeat(len(x)), x.repeat_interleave(len(x))
    out = torch.empty_like(a)
    launch(kernels.binary, (-(-len(a) // 64),), a, b, out, len(a), what, 64, target=target)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    assert out.tolist() == [_expected(what, *pair, dtype) for pair in pairs]


def _expected(what: str, a: int, b: int, dtype: torch.dtype) -> int:
    size = torch.iinfo(dtype).bits
    divisor = b or 1
    quotient = abs(a) // abs(divisor) * (1 if (a < 0) == (divisor < 0) else -1)
    value = {
        "quotient": quotient,
        "remainder": a - quotient * divisor,
        "high": (a % 2**size) * (b % 2**size) >> size,
        "add": a + b,
        "mul": a * b,
        "least": min(a, b),
    }[what]
    return (value + 2 ** (size - 1)) % 2**size - 2 ** (size - 1)


def test_floats_to_integers_saturate(target: Target) -> None:
    x = torch.tensor([0.0, 1.9, -1.9, 2.0**31, -(2.0**31), 1e30, -1e30, math.inf, math.nan])
    actual = _unary(x, "int", target, torch.int32).tolist()
    limits = 2**31 - 1, -(2**31)
    assert actual == [0, 1, -1, limits[0], limits[1], limits[0], limits[1], limits[0], 0]
