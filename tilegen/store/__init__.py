"""Records of tuning winners: their form (`record`), where they are kept and found (`lookup`)."""

from tilegen.store.lookup import (
    Difference,
    Found,
    Listed,
    Location,
    Saved,
    list_records,
    locations,
    look_up,
    save,
    why,
    why_lines,
)
from tilegen.store.record import (
    SCHEMA,
    EstimateSummary,
    TuningRecord,
    Versions,
    current_versions,
    now,
    record_path,
    slug,
)

__all__ = [
    "SCHEMA",
    "Difference",
    "EstimateSummary",
    "Found",
    "Listed",
    "Location",
    "Saved",
    "TuningRecord",
    "Versions",
    "current_versions",
    "list_records",
    "locations",
    "look_up",
    "now",
    "record_path",
    "save",
    "slug",
    "why",
    "why_lines",
]
