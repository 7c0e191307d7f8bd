"""Programs of torch.export and AOTInductor run elsewhere, with nothing of tilegen but operators."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support import warm

LAYER = """
import json
import sys
import torch
import tilegen

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Buffer(torch.tensor([0.5, 0.25]))

    def forward(self, x):
        score = lambda s, b, h, i, j: s - self.slopes[h] * (i - j)
        return tilegen.attention(x, x * 2, x, mask=tilegen.causal(), score=score)

torch.manual_seed(0)
x = torch.randn(1, 2, 9, 8)
exported = torch.export.export(Layer(), (x,), dynamic_shapes=({2: torch.export.Dim.AUTO},))
torch.export.save(exported, sys.argv[1])
torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[2])
shorter = x[:, :, :5].contiguous()
print(json.dumps([Layer()(one).flatten().tolist() for one in (x, shorter)]))
"""
LOADED = """
import json
import sys
import torch
import tilegen.operators

torch.manual_seed(0)
x = torch.randn(1, 2, 9, 8)
if sys.argv[2] == "export":
    run = torch.export.load(sys.argv[1]).module()
else:
    run = torch._inductor.aoti_load_package(sys.argv[1])
shorter = x[:, :, :5].contiguous()
print(json.dumps([run(one).flatten().tolist() for one in (x, shorter)]))
"""


# The C++ around the operators may be slow: nothing optimises it, or tries which vectors there are.
QUICKLY = {"AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


@pytest.mark.slow
def test_a_layer_runs_in_another_process(tmp_path: Path) -> None:
    paths = {how: str(tmp_path / f"{how}.pt2") for how in ("export", "AOTInductor")}
    written = warm.output(LAYER, *paths.values(), env={**os.environ, **QUICKLY})
    expected = json.loads(written.splitlines()[-1])
    for how, path in paths.items():
        actual = json.loads(warm.output(LOADED, path, how).splitlines()[-1])
        assert [pytest.approx(one, abs=1e-6) for one in expected] == actual, how
