"""What a person may set about the embedded storage: section "storage"."""

from __future__ import annotations

from multibroker.config import Setting, count, size
from multibroker.storage.limits import StorageLimits

_D = StorageLimits()

SETTINGS = (
    Setting(
        "open-files-max",
        _D.open_files_max,
        "segment files kept open; others are opened again when they are needed",
        count(16),
    ),
    Setting(
        "index-cache-bytes",
        _D.index_cache_bytes,
        "memory for the indexes of segments that are being read",
        size(1 << 20),
    ),
    Setting(
        "upkeep-secs",
        _D.upkeep_secs,
        "how often retention and compaction are looked at, beside each roll",
        count(1),
    ),
)
