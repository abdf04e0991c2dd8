"""BlipMQ as a plugin: its name, where it listens and what can be set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from zope.interface import implementer

from multibroker import keys
from multibroker.config import Setting, count, milliseconds, seconds, size, text
from multibroker.errors import ConfigError
from multibroker.interfaces import IWire
from multibroker.keys import KeyRing
from multibroker.protocols.blipmq.server import BlipmqFactory
from multibroker.protocols.blipmq.subscriptions import Subscriptions, policy_of
from multibroker.protocols.wire import connection_settings

if TYPE_CHECKING:
    from multibroker.services import Services


def api_key(value: Any) -> str:
    key = text(value)
    if not 1 <= len(key.encode()) <= keys.KEY_BYTES_MAX:
        raise ValueError(f"a key has 1..{keys.KEY_BYTES_MAX} bytes")
    return key


def factor(value: Any) -> float:
    number = float(value)
    if not 1 <= number <= 100:
        raise ValueError(f"{number} is not 1..100")
    return number


SETTINGS = (
    *connection_settings(first_frame_secs=10, idle_secs=300),
    Setting(
        "api-key",
        (),
        "a key that may do everything, for a quick start: other processes can see options",
        api_key,
        option="api-key",
        many=True,
    ),
    Setting(
        "keys-file",
        "",
        "file of hashed keys and their rules (see `multibroker keys`);"
        " by default the file keys in the data directory, if it is there",
        text,
        option="keys-file",
    ),
    Setting(
        "auth-failures-max",
        5,
        "wrong keys on one connection before it is closed",
        count(1),
    ),
    Setting(
        "auth-failures-per-address-max",
        50,
        "wrong keys from one address within the window before it is refused; 0 turns it off",
        count(),
    ),
    Setting("auth-window-secs", 60, "how long a wrong key is held against its address", seconds(1)),
    Setting(
        "ack-timeout-ms",
        30_000,
        "a QoS 1 message that is not acknowledged by then is delivered again; 0 turns it off",
        milliseconds(0),
    ),
    Setting(
        "ack-timeout-factor",
        1.0,
        "by which the timeout grows with each delivery of the same message",
        factor,
    ),
    Setting("ack-timeout-ms-max", 3_600_000, "where that growth ends", milliseconds(1)),
    Setting(
        "deliveries-max",
        0,
        "deliveries of one message before it is given up; 0 means no limit",
        count(),
    ),
    Setting("dead-letter-topic", "", "topic for messages that are given up", text),
    Setting(
        "in-flight-max",
        10_000,
        "unacknowledged messages of one subscription on one connection",
        count(1),
    ),
    Setting(
        "subscription-expiry-secs",
        86_400,
        "a subscription that no connection has used for this long is removed; 0 keeps it",
        seconds(),
    ),
    Setting("subscriptions-per-key-max", 5_000, "subscriptions of one API key", count(1)),
    Setting(
        "unstored-bytes-max",
        8 * 2**20,
        "published but not yet stored bytes of one connection before it is held back",
        size(65_536),
    ),
    Setting(
        "long-poll-ms",
        0,
        "extension: how long a POLL of an empty queue waits for a message; 0 answers at once",
        milliseconds(0, 3_600_000),
    ),
)


@implementer(IWire)
class BlipmqWire:
    """The plugin."""

    name = "blipmq"
    title = "BlipMQ: authenticated queues with quality of service"
    default_endpoints = ("tcp:5555:interface=127.0.0.1",)
    settings = SETTINGS

    def factory(self, services: Services) -> Deferred[BlipmqFactory]:
        return Deferred.fromCoroutine(self._factory(services))

    async def _factory(self, services: Services) -> BlipmqFactory:
        settings = services.settings
        data_dir = services.data_dir
        idle_secs = settings["idle-timeout-secs"]
        if idle_secs and settings["long-poll-ms"] >= idle_secs * 1000:
            raise ConfigError("blipmq.long-poll-ms", "must be shorter than idle-timeout-secs")
        if services.config[""]["development"] and not settings["keys-file"]:
            keys.development_key(data_dir)
        subscriptions = Subscriptions(
            services.broker, policy_of(settings), settings["subscriptions-per-key-max"]
        )
        await subscriptions.start()
        given = [keys.unnamed_key(key) for key in settings["api-key"]]

        def load_keys() -> KeyRing:
            return KeyRing([*given, *load_file(settings["keys-file"], data_dir)])

        return BlipmqFactory(
            services.broker, settings, services.reactor, load_keys, subscriptions
        )

    def first_message(self, data_dir: Path) -> str:
        """How to say something, for somebody who has just started a broker."""
        key_file = data_dir / keys.DEVELOPMENT_FILE_NAME
        shown = key_file if key_file.exists() else "FILE-WITH-YOUR-KEY"
        return f"multibroker blipmq pub demo 'hello from BlipMQ' --key-file {shown}"


def load_file(given: str, data_dir: Path) -> list[keys.ApiKey]:
    """The keys of the file that was named, or of the data directory's own if there is one."""
    path = Path(given) if given else data_dir / keys.FILE_NAME
    return keys.load(path) if given or path.exists() else []
