"""The server's tests once more, on durable sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import maybeDeferred

from multibroker.sessions import DurableSessions
from tests.protocols.reliable import test_server
from tests.protocols.reliable.harness import bounds


class OnDurableSessions:
    def make_sessions(self: Any, settings: dict[str, Any]) -> DurableSessions:
        sessions = DurableSessions(
            Path(self.mktemp()), self.clock, maybeDeferred,
            expiry_seconds=settings["session-expiry-secs"], bounds=bounds(settings),
            wall=self.clock.seconds)
        sessions.open()
        self.addCleanup(sessions._journal.close)
        return sessions


class DurableStatefulTests(OnDurableSessions, test_server.StatefulTests):
    pass


class DurableOwnershipTests(OnDurableSessions, test_server.OwnershipTests):
    pass


class DurableLimitTests(OnDurableSessions, test_server.LimitTests):
    pass
