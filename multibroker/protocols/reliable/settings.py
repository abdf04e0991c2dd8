"""What can be set for this wire; docs/protocols/reliable.md explains."""

from __future__ import annotations

from multibroker.config import Setting, count, milliseconds, seconds, size
from multibroker.protocols.wire import connection_settings

SETTINGS = (
    *connection_settings(first_frame_secs=30, idle_secs=0),
    Setting(
        "interval-ms", 1000,
        "the wait between two messages of a stream; 0 = as fast as the client reads",
        milliseconds(0), option="reliable-interval",
    ),
    Setting(
        "session-expiry-secs", 180,
        "a session is forgotten this long after its client went away",
        seconds(30), option="reliable-expiry",
    ),
    Setting(
        "linger-ms", 1000, "the wait for the client's end, or a rewind, after the last message",
        milliseconds(0),
    ),
    Setting(
        "close-timeout-secs", 10,
        "a client that does not read what is left is cut off this long after the close", seconds(1),
    ),
    Setting(
        "ack-timeout-secs", 30,
        "a client that has to acknowledge before it gets more is refused after this long",
        seconds(1),
    ),
    Setting(
        "line-bytes-max", 1024 * 1024,
        "the longest line from a client, and so the longest value of a stateless stream",
        size(4096),
    ),
    Setting("uuid-bytes-max", 256, "the longest uuid", count(1, 65_535)),
    Setting("sessions-max", 100_000, "sessions at once, connected or waiting", count(1)),
    Setting(
        "unacknowledged-max", 65_535,
        "messages that a session may hold without an acknowledgement", count(1),
    ),
)

DEFAULTS = {setting.key: setting.default for setting in SETTINGS}
