"""Elements of captured tensors: PyTorch's names, Triton's, and the kinds that expressions know."""

ELEMENTS = {
    "bool": "u8",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
}
"""Triton's name for elements of captured tensors, by PyTorch's."""

BOUNDS = {
    "bool": (0, 1),
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
}
"""Smallest and largest value of elements of fewer than 64 bits, by PyTorch's name."""


def kind_of(element: str) -> str:
    """Return bool, int, int64, float or float64, by PyTorch's name for elements."""
    if element in ("bool", "int64", "float64"):
        return element
    return "float" if element.startswith(("float", "bfloat")) else "int"
