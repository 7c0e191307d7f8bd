"""Records of tuning winners: format (`record`), locations (`places`), look-up (`lookup`), lists and
upkeep (`listing`), joining (`election`), moving between stores (`transfer`)."""

from tilegen.store.election import Saved, dated, save
from tilegen.store.listing import Listed, list_records
from tilegen.store.lookup import Difference, Found, answer, look_up, why, why_lines
from tilegen.store.places import Location, locations
from tilegen.store.record import SCHEMA, EstimateSummary, TuningRecord, record_path, slug
from tilegen.store.remote import Unreachable
from tilegen.store.versions import Versions, current_versions, now, this_machine

__all__ = [
    "SCHEMA",
    "Difference",
    "EstimateSummary",
    "Found",
    "Listed",
    "Location",
    "Saved",
    "TuningRecord",
    "Unreachable",
    "Versions",
    "answer",
    "current_versions",
    "dated",
    "list_records",
    "locations",
    "look_up",
    "now",
    "record_path",
    "save",
    "slug",
    "this_machine",
    "why",
    "why_lines",
]
