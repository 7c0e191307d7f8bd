"""Format a candidate for `tilegen propose`."""

from __future__ import annotations

from tilegen.model.estimate import Candidate


def candidate_line(candidate: Candidate) -> str:
    """Format a config with its time by the model and by its machine code, and the reason for it.
    Numbers of compiled code are marked; all others are predictions."""
    cost, code = candidate.estimate, candidate.compiled
    by_code = triton = ""
    if code is not None:
        by_code = "refused"
        if code.seconds is not None and not code.objection:
            by_code = f"{1e6 * code.seconds:.1f} us compiled"
        triton = f"; Triton {code.triton} made"
        if (used := code.resources) is None:
            triton += f" nothing of it: {code.objection}"
        else:
            triton += (
                f" {used.registers} registers, {used.spill_bytes} bytes spilled and "
                f"{used.shared_bytes / 1024:.4g} KiB of shared memory of it"
            )
            triton += f", no call uses it: {code.objection}" if code.objection else ""
    return (
        f"{candidate.config.key:14}{1e6 * cost.seconds:9.1f} us predicted {by_code:>19}  "
        f"{cost.limit:8}{candidate.reason}{triton}"
    )
