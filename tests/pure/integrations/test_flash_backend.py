"""tilegen in PyTorch's registry of flash attention implementations."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

import tilegen
from tests.support import warm
from tilegen.integrations import flash_backend

pytestmark = pytest.mark.oldest
HERE = [name for name in flash_backend.OPERATORS if hasattr(torch.ops.aten, name)]
"""The operators that this version of PyTorch has."""


def overridden() -> list[str]:
    """The operators of aten that have a kernel on CUDA, which a build for CPUs gives none."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in HERE if has(f"aten::{name}", "CUDA")]


@pytest.fixture
def before() -> Iterator[list[str]]:
    assert current_flash_attention_impl() is None
    yield overridden()
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def test_activated_and_deactivated(before: list[str]) -> None:
    tilegen.activate()
    assert "tilegen" in list_flash_attention_impls()
    assert current_flash_attention_impl() == "tilegen"
    assert overridden() == HERE
    tilegen.activate()
    tilegen.deactivate()
    assert current_flash_attention_impl() is None
    assert overridden() == before
    tilegen.deactivate()  # which says nothing


def test_by_its_name_in_the_registry_of_torch(before: list[str]) -> None:
    activate_flash_attention_impl("tilegen")
    assert overridden() == HERE
    restore_flash_attention_impl()
    assert overridden() == before


def test_another_implementation_is_left_alone(before: list[str]) -> None:
    removed: list[str] = []

    class Other:
        def remove(self) -> None:
            removed.append("other")

    torch.nn.attention.register_flash_attention_impl("of a test", register_fn=Other)
    try:
        activate_flash_attention_impl("of a test")
        tilegen.deactivate()
        assert current_flash_attention_impl() == "of a test"
        tilegen.activate()
        assert removed == ["other"]
    finally:
        del torch.nn.attention._registry._FLASH_ATTENTION_IMPLS["of a test"]


def test_importing_tilegen_registers_nothing() -> None:
    code = (
        "import tilegen, torch.nn.attention as a\n"
        "assert 'tilegen' not in a.list_flash_attention_impls()\n"
        "tilegen.activate\n"
        "assert 'tilegen' in a.list_flash_attention_impls()\n"
        "assert a.current_flash_attention_impl() is None\n"
    )
    assert warm.output(code) == ""


@pytest.mark.parametrize("name", HERE)
def test_overrides_take_the_arguments_of_operators(name: str) -> None:
    """By position and by name, as PyTorch's schema says it."""
    schema = getattr(torch.ops.aten, name).default._schema
    function = flash_backend.OPERATORS[name]
    if function is flash_backend.flash_attention_forward_inplace:  # all but `out` is passed on
        function = flash_backend.flash_attention_forward
        schema_arguments = schema.arguments[1:]
    else:
        schema_arguments = schema.arguments
    parameters = inspect.signature(function).parameters.values()
    positions = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positions == [one.name for one in schema_arguments if not one.kwarg_only]
    named = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert {one.name for one in schema_arguments if one.kwarg_only} <= named
