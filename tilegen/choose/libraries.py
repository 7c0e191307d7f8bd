"""Choose between tilegen's kernels and a library's for a whole pass, by measured times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegen.disk import say_once
from tilegen.environment import current
from tilegen.kernels.spec import Backend, Direction
from tilegen.problem import AttentionProblem
from tilegen.store.library_record import library_record
from tilegen.store.versions import current_versions

if TYPE_CHECKING:
    from tilegen.choose.records import Records

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


def why_not(problem: AttentionProblem, backend: Backend) -> str:
    """Return the reason why a library is not used for a problem; empty if it is.

    A library that cannot compute the problem on some GPU raises an error when it is measured.
    """
    if not (problem.mask.is_full or problem.mask.is_causal):
        return f"{backend} supports only causal masks, got {problem.mask}"
    if problem.mask.is_causal and problem.seqlen_q != problem.seqlen_kv:
        return f"{backend} is used only for square causal masks"
    if problem.score or problem.dropout:
        return f"{backend} is used only without changes of scores and without dropout"
    if problem.page:
        return f"{backend} does not read pages of a cache"
    if problem.invariant:
        return f"{backend} sums in an order that depends on the batch"
    if problem.dtype == "fp32":
        return f"{backend} is used only for fp16 and bf16: it may round products of fp32"
    if problem.head_dim_qk != problem.head_dim_v:
        return f"{backend} is used only for equal head dims"
    if problem.head_dim_qk > MAX_HEAD_DIM or problem.head_dim_qk % HEAD_DIM_STEP:
        return f"{backend} supports head dims in multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    if backend == "efficient" and problem.group_size > 1:
        return f"{backend} does not support grouped key-value heads"
    return ""


def faster_library(records: Records, direction: Direction, seconds: float) -> Backend | None:
    """Return the library that computes a pass in less than `seconds`; None if there is none.

    A library is used only with TILEGEN_LIBRARIES=1 and a record of the installed PyTorch, and never
    if choices must be deterministic.
    """
    if not current().libraries or records.deterministic:
        return None
    record = library_record(records.problem, records.device, direction)
    if record is None or why_not(records.problem, record.library):
        return None
    there, here = record.versions, current_versions()
    if (there.torch, there.cuda) != (here.torch, here.cuda):
        say_once(
            f"library {record.library} for '{records.problem.bucket}' was measured with torch "
            f"{there.torch}, but {here.torch} is installed; rerun tilegen tune"
        )
        return None
    return record.library if record.seconds < seconds else None
