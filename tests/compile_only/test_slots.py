"""The kernel that writes new keys and values into pages compiles, once for all lengths, and moves
16 bytes at once."""

from __future__ import annotations

import pytest
import torch

import tilegen
from tilegen import cpu
from tilegen.runtime import slots
from tilegen.runtime.slots import write_slots
from tilegen.runtime.write_kernel import write_tokens


@pytest.mark.usefixtures("compile_instead_of_launching")
@pytest.mark.parametrize("heads, dims", [(8, (128, 128)), (1, (576, 512))])
def test_no_length_recompiles(
    heads: int, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: the kernel is launched, by Triton.
    monkeypatch.setattr(slots, "_runs_kernel", lambda k: True)
    monkeypatch.setattr(cpu, "runs_compiled", lambda device: False)
    write_tokens.device_caches.clear()
    pages = [torch.randn(64, 16, heads, dim).bfloat16() for dim in dims]
    for requests, new, columns in ((1, 1, 1), (3, 1, 5), (16, 4, 16), (20, 7, 3)):
        new_rows = (torch.randn(requests, heads, new, dim).bfloat16() for dim in dims)
        table = torch.zeros(requests, columns, dtype=torch.int32)
        tilegen.append_paged(*new_rows, *pages, table, torch.full((requests,), 8))
    for tokens in (1, 5, 16):
        rows = (torch.randn(tokens, heads, dim).bfloat16() for dim in dims)
        write_slots(*rows, *pages, torch.arange(tokens))
    binaries = list(write_tokens.device_caches[0][0].values())
    assert len(binaries) == 2, "one for tables, one for slots"
    for binary in binaries:
        assert "ld.global.v4.b32" in binary.asm["ptx"]
        assert "st.global.v4.b32" in binary.asm["ptx"]
