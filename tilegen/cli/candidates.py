"""The line of `tilegen propose` for one candidate."""

from __future__ import annotations

from tilegen.model.estimate import Candidate


def candidate_line(one: Candidate) -> str:
    """Return a config, its time by the model and by its machine code, and the reason for it; what
    was compiled says so, all else is predicted."""
    cost, code = one.estimate, one.compiled
    by_code = told = ""
    if code is not None:
        by_code = "refused"
        if code.seconds is not None and not code.objection:
            by_code = f"{1e6 * code.seconds:.1f} us compiled"
        told = f"; Triton {code.triton} made"
        if (used := code.resources) is None:
            told += f" nothing of it: {code.objection}"
        else:
            told += (
                f" {used.registers} registers, {used.spill_bytes} bytes spilled and "
                f"{used.shared_bytes / 1024:.4g} KiB of shared memory of it"
            )
            told += f", no call uses it: {code.objection}" if code.objection else ""
    return (
        f"{one.config.key:14}{1e6 * cost.seconds:9.1f} us predicted {by_code:>19}  "
        f"{cost.limit:8}{one.reason}{told}"
    )
