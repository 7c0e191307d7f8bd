"""Let rank 0 choose configs for all ranks of a job, in one collective call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilegen import pipeline
from tilegen.choose.records import remember
from tilegen.errors import TilegenError, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS, check_config
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.version import __version__

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec


def agree(
    problems: Sequence[AttentionProblem | str], *, group: Any = None
) -> dict[tuple[str, str], TileConfig]:
    """Return the config of each (kernel, problem), as rank 0 chooses it by records and model only.

    From then on `attention` uses these configs on every rank. A collective call of
    torch.distributed: all ranks of `group` (default: all) make it with the same problems, before or
    after their first `attention`, each with its GPU current. Raises Unsupported on all ranks if
    they differ in GPU, versions or problems, or if the choice fails on rank 0.
    """
    import torch.distributed as dist

    from tilegen.gpus.spec import current_gpu

    if not dist.is_initialized():
        raise Unsupported(
            "agreeing needs torch.distributed; call torch.distributed.init_process_group first, or "
            "set TILEGEN_DETERMINISTIC=1 where all ranks see the same records"
        )
    parsed = [
        AttentionProblem.parse(problem) if isinstance(problem, str) else problem
        for problem in problems
    ]
    buckets = list(dict.fromkeys(problem.bucket for problem in parsed))
    spec = current_gpu()
    _require_equal([__version__, repr(spec), *(bucket.key for bucket in buckets)], group)
    choices = _broadcast(_choices(buckets, spec) if dist.get_rank(group) == 0 else "", group)
    values = json.loads(choices)
    if isinstance(values, str):
        raise Unsupported(f"rank 0 could not choose: {values}")
    chosen: dict[tuple[str, str], TileConfig] = {}
    for name, key, text in values:
        kernel = KERNELS[name].name
        config = TileConfig.parse(text)
        check_config(config, kernel)
        chosen[name, key] = config
        remember(spec, kernel, key, config)
    plans.forget()
    return chosen


def _choices(buckets: Sequence[AttentionProblem], spec: GpuSpec) -> str:
    """Return (kernel, problem, config) of every choice as JSON.

    If a choice fails, returns the error's text instead of raising, so that no rank waits forever.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    try:
        return json.dumps(
            [
                (kernel, problem.key, chosen.config.key)
                for problem in buckets
                for kernel, chosen in pipeline.choose(
                    problem, spec, deterministic=True, may_compile=has_gpu
                ).items()
            ]
        )
    except TilegenError as error:
        return json.dumps(str(error))


def _require_equal(facts: list[str], group: Any) -> None:
    """Raise Unsupported on all ranks if the facts are not the same on all of them."""
    import torch.distributed as dist

    digest = int(hashlib.sha256("\n".join(facts).encode()).hexdigest()[:15], 16)
    least, most = _tensor([digest], group), _tensor([digest], group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    if int(least) != int(most):
        raise Unsupported(
            "expected one tilegen version, GPU model and list of problems on all ranks, found "
            f"several; this rank: tilegen {facts[0]}, {facts[1][:200]}, {len(facts) - 2} problems; "
            "call agree once per group of equal ranks"
        )


def _broadcast(text: str, group: Any) -> str:
    """Return rank 0's text, sent as bytes: torch.distributed would pickle objects."""
    import torch.distributed as dist

    data = text.encode()
    size = _tensor([len(data)], group)
    dist.broadcast(size, group_src=0, group=group)
    content = _tensor([*data, *bytes(int(size) - len(data))], group)
    dist.broadcast(content, group_src=0, group=group)
    return bytes(content.tolist()).decode()


def _tensor(values: Sequence[int], group: Any) -> Any:
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.tensor(values, dtype=torch.int64, device=device)
