"""twistd's options and the service tree: the only file that names every part."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.application.service import IService
from twisted.plugin import getPlugins
from twisted.python import usage

from multibroker.broker.broker import Broker
from multibroker.broker.settings import SETTINGS as BROKER_SETTINGS
from multibroker.broker.settings import Limits
from multibroker.broker.stats import Stats
from multibroker.config import (
    Config,
    Section,
    Setting,
    build,
    count,
    flag,
    read_file,
    seconds,
    text,
)
from multibroker.errors import ConfigError
from multibroker.interfaces import IWire
from multibroker.lifecycle import Lifecycle
from multibroker.service import BrokerService, DeclaredTopic, Listener
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.limits import StorageLimits
from multibroker.storage.local import LocalStorage
from multibroker.storage.settings import SETTINGS as STORAGE_SETTINGS
from multibroker.topicconfig import TopicConfig

CORE_SETTINGS = (
    Setting(
        "data-dir",
        Path("multibroker-data"),
        "where the log and everything else that must survive is kept",
        lambda value: Path(text(value)),
        option="data-dir",
    ),
    Setting(
        "fsync",
        FsyncPolicy(),
        "when a message counts as stored: always, interval:MS or never",
        FsyncPolicy.parse,
        option="fsync",
    ),
    Setting(
        "shutdown-timeout-secs",
        10,
        "how long a stop waits for what is in flight",
        seconds(),
        option="shutdown-timeout",
    ),
    Setting(
        "development",
        False,
        "make a development API key if there is none, and say how to send a first message",
        flag,
        option="development",
    ),
)

PARTITIONS = Setting("partitions", 1, "partitions of a topic", count(1, 65_535))
FREE_TABLES = {"topics": "[topics.NAME]: settings of a topic, made at start if it is missing"}


def find_wires() -> Sequence[Any]:
    """Every installed protocol, by name."""
    return sorted(getPlugins(IWire), key=lambda wire: str(wire.name))


def sections(wires: Iterable[Any]) -> list[Section]:
    """The whole schema: what options, file, example and documentation are made from."""
    return [
        Section("", CORE_SETTINGS),
        Section("broker", BROKER_SETTINGS),
        Section("storage", STORAGE_SETTINGS),
        *(Section(wire.name, (listen_setting(wire), *wire.settings)) for wire in wires),
    ]


def listen_setting(wire: Any) -> Setting:
    return Setting(
        "listen",
        (),
        f"{wire.title}: an endpoint such as {wire.default_endpoints[0]}",
        text,
        option=wire.name,
        many=True,
    )


class BrokerOptions(usage.Options):
    """Options are generated from the settings; `options_class` adds one method for each."""

    synopsis = "[options]"
    longdesc = (
        "One durable log that speaks several messaging protocols. Each protocol option takes a "
        "Twisted endpoint string and may be given several times; if none is given, all of them "
        "listen on 127.0.0.1 at their usual ports."
    )
    wires: Sequence[Any] = ()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: dict[str, Any] = {}
        self["config"] = None

    def opt_config(self, path: str) -> None:
        """A TOML file with the same settings; an option wins over it."""
        self["config"] = path

    def postOptions(self) -> None:
        """Everything is validated here, so that a bad value is one line and a non-zero exit."""
        try:
            document = read_file(Path(self["config"])) if self["config"] else {}
            self.settings = build(sections(self.wires), self.given, document, FREE_TABLES)
            declared_topics(self.settings)
        except ConfigError as error:
            # A UsageError would bury this line under the list of all options.
            raise SystemExit(f"multibroker: {error}") from None


def options_class(wires: Sequence[Any]) -> type[BrokerOptions]:
    """BrokerOptions with a method for every setting that has an option."""
    methods: dict[str, Any] = {"wires": wires}
    for section in sections(wires):
        for setting in section.settings:
            if setting.option is not None:
                methods["opt_" + setting.option.replace("-", "_")] = _option_method(setting)
    return type("Options", (BrokerOptions,), methods)


def _option_method(setting: Setting) -> Any:
    name = setting.option

    def take_flag(self: BrokerOptions) -> None:
        self.given[str(name)] = True

    def take_value(self: BrokerOptions, value: str) -> None:
        if setting.many:
            self.given.setdefault(str(name), []).append(value)
        else:
            self.given[str(name)] = value

    method: Any = take_flag if setting.parse is flag else take_value
    default = "" if setting.default in ((), None, False) else f" [default: {setting.default}]"
    method.__doc__ = setting.help + default
    return method


def Options() -> BrokerOptions:
    return options_class(find_wires())()


def makeService(options: BrokerOptions) -> IService:
    from twisted.internet import reactor

    return make_service(options.settings, options.wires, reactor)


def make_service(config: Config, wires: Sequence[Any], reactor: Any) -> BrokerService:
    lifecycle = Lifecycle()
    core = config[""]
    limits, stats = Limits.from_settings(config["broker"]), Stats()
    storage = LocalStorage(
        str(core["data-dir"]),
        reactor,
        core["fsync"],
        stats=stats.storage,
        limits=StorageLimits.from_settings(config["storage"], limits.partitions_max),
    )
    broker = Broker(storage, reactor, limits, stats)
    listening = listeners(config, wires)
    welcome = None
    if core["development"]:
        welcome = _Welcome(listening, core["data-dir"])
    topics = declared_topics(config)
    return BrokerService(config, listening, broker, reactor, lifecycle, topics, welcome)


def declared_topics(config: Config) -> list[DeclaredTopic]:
    """The `[topics.NAME]` tables of the file."""
    tables = config.extra.get("topics", {})
    if not isinstance(tables, Mapping):
        raise ConfigError("topics", "expected tables [topics.NAME]")
    return [_declared_topic(name, table) for name, table in tables.items()]


def _declared_topic(name: str, table: Any) -> DeclaredTopic:
    label = f"topics.{name}"
    if not isinstance(table, Mapping):
        raise ConfigError(label, "expected a table")
    pairs = {key: str(value) for key, value in flatten(table) if key != "partitions"}
    partitions = PARTITIONS.value(table.get("partitions", 1), f"{label}.partitions")
    try:
        TopicConfig().changed(pairs)
    except ConfigError as error:
        raise ConfigError(f"{label}.{error.key}", error.problem) from None
    return DeclaredTopic(name.encode(), partitions, pairs)


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """TOML reads `log.retention.secs = 5` as nested tables; here they are flat keys again."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def listeners(config: Config, wires: Sequence[Any]) -> list[Listener]:
    """What is named, or if nothing is named the embedded default."""
    named: Mapping[str, Sequence[str]] = {wire.name: config[wire.name]["listen"] for wire in wires}
    if not any(named.values()):
        named = {wire.name: wire.default_endpoints for wire in wires}
    return [Listener(wire, endpoint) for wire in wires for endpoint in named[wire.name]]


class _Welcome:
    """What a person sees who has just started a broker for the first time."""

    def __init__(self, listening: Sequence[Listener], data_dir: Path) -> None:
        self._wires = list(dict.fromkeys(listener.wire for listener in listening))
        self._data_dir = data_dir
        self._command = "multibroker"
        if shutil.which("multibroker") is None:
            self._command = os.path.relpath(Path(sys.executable).parent / "multibroker")

    def __call__(self) -> str:
        lines = ["", "The broker is running. Send a first message from another terminal:", ""]
        for wire in self._wires:
            hint = getattr(wire, "first_message", None)
            if hint is not None:
                text = str(hint(self._data_dir)).replace("multibroker ", f"{self._command} ", 1)
                lines.append(f"  {wire.name:<9} {text}")
        lines += ["", "Stop it with Ctrl-C. Nothing acknowledged is lost.", ""]
        return "\n".join(lines)
