from __future__ import annotations

from multibroker.sessions import MemorySessions
from tests.sessions.contract import BOUNDS, EXPIRY_SECONDS, ExpiryContract, SessionsContract


class MemorySessionsTests(SessionsContract, ExpiryContract):
    def make(self) -> MemorySessions:
        return MemorySessions(self.clock, expiry_seconds=EXPIRY_SECONDS, bounds=BOUNDS)


del ExpiryContract, SessionsContract
