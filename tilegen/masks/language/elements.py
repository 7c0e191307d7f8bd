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


def kind_of(element: str) -> str:
    """Return bool, int or float, by PyTorch's name for elements."""
    if element == "bool":
        return "bool"
    return "float" if element.startswith(("float", "bfloat")) else "int"
