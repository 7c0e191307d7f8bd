"""Tensors that are spread over devices (DTensor): each device attends to its part."""

from __future__ import annotations

from tests.support import warm

SPREAD = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import tilegen
from tests.support.traced import qkv
from tilegen.errors import Unsupported

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
given = qkv()
for dim in (0, 1):
    parts = [x.detach().chunk(2, dim)[0].contiguous() for x in given]
    spread = [DTensor.from_local(x, mesh, [Shard(dim)]).requires_grad_() for x in parts]
    score = tilegen.softcap(2.0)
    out = tilegen.attention(*spread, mask=tilegen.causal(), score=score)
    assert out.placements == (Shard(dim),) and out.shape == given[0].shape
    whole = tilegen.attention(*given, mask=tilegen.causal(), score=score)
    torch.testing.assert_close(out.to_local(), whole.chunk(2, dim)[0])
    out.cos().sum().backward()
    grads = torch.autograd.grad(whole.cos().sum(), given)
    for one, grad in zip(spread, grads):
        torch.testing.assert_close(one.grad.to_local(), grad.chunk(2, dim)[0])
for dim, mask in (
    (0, tilegen.predicate(lambda b, h, i, j: i >= j + b)),
    (1, tilegen.sliding_window(tilegen.values([1, 2, 3, 4], "h"), 0)),
    (2, tilegen.causal()),
):
    spread = [DTensor.from_local(x.detach(), mesh, [Shard(dim)]) for x in given]
    try:
        tilegen.attention(*spread, mask=mask)
    except Unsupported as error:
        print(str(error).partition(";")[0])
"""


def test_each_device_attends_to_its_part() -> None:
    refused = warm.output(SPREAD).splitlines()
    assert len(refused) == 3
    assert refused[0].startswith("expected a mask and a score without tensors and without b")
    assert refused[1].startswith("expected a mask and a score without tensors and without h")
    assert refused[2].startswith("expected q, k and v replicated, or sharded along batch or heads")
