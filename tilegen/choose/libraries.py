"""The choice between tilegen's kernels and a library's, for a whole pass: by measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilegen.choose.families import kernels_used
from tilegen.choose.records import Records
from tilegen.disk import say_once
from tilegen.kernels.config import Kernel
from tilegen.kernels.spec import Direction
from tilegen.masks.mask import Causal, Full
from tilegen.problem import AttentionProblem
from tilegen.settings import settings
from tilegen.store.library_record import Backend, LibraryRecord, library_record
from tilegen.store.versions import current_versions

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


def why_not(problem: AttentionProblem, backend: Backend) -> str:
    """Return why a library is not used for a problem; empty if it is.

    A library that refuses the problem on some GPU raises there, when it is measured.
    """
    if not isinstance(problem.mask, Full | Causal):
        return f"{backend} takes no mask but causal, got {problem.mask}"
    if isinstance(problem.mask, Causal) and problem.seqlen_q != problem.seqlen_kv:
        return f"{backend} is used only for square causal masks"
    if problem.score or problem.dropout:
        return f"{backend} is used only without changes of scores and without dropout"
    if problem.invariant:
        return f"{backend} adds up in an order that depends on the batch"
    if problem.dtype == "fp32":
        return f"{backend} is used only for fp16 and bf16: products of fp32 may be rounded"
    if problem.head_dim_qk != problem.head_dim_v:
        return f"{backend} is used only for equal head dims"
    if problem.head_dim_qk > MAX_HEAD_DIM or problem.head_dim_qk % HEAD_DIM_STEP:
        return f"{backend} takes multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM} as head dim"
    if backend == "efficient" and problem.group_size > 1:
        return f"{backend} shares no key-value heads"
    return ""


def library_of(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> str:
    """Return `library: flash` for a pass that calls leave to a library; empty for others."""
    records = Records(problem, gpu)
    record = library_used(records, direction, kernels_used(records, direction))
    return record.config if record else ""


def library_used(
    records: Records, direction: Direction, kernels: Sequence[Kernel]
) -> LibraryRecord | None:
    """Return the record of the library that computes a pass, None for tilegen's own kernels.

    A library is taken only with TILEGEN_LIBRARIES=1, and where its record, of the PyTorch that is
    installed, has less time than the records of these kernels together. Predictions do not count,
    and ranks that agreed, or choose deterministically, take no library.
    """
    if not settings().libraries or records.deterministic or any(map(records.agreed, kernels)):
        return None
    record = library_record(records.problem, records.device, direction)
    if record is None or why_not(records.problem, record.library):
        return None
    there, here = record.versions, current_versions()
    if (there.torch, there.cuda) != (here.torch, here.cuda):
        say_once(
            f"{record.config} for '{records.problem.bucket}' was measured with torch "
            f"{there.torch}, but {here.torch} is installed; rerun tilegen tune"
        )
        return None
    own = [records.seconds(kernel) for kernel in kernels]
    measured = [seconds for seconds in own if seconds is not None]
    taken = 1e-6 * (record.measurement.median_us or 0.0)
    if len(measured) < len(own) or not taken < sum(measured):
        return None
    return record
