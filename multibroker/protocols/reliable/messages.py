"""What the two sides of a reliable stream say to each other."""

from __future__ import annotations

from dataclasses import dataclass

COUNT_MAX = 0xFFFF
ID_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class BeginStateless:
    """`{}`: a new stateless stream."""


@dataclass(frozen=True, slots=True)
class ResumeStateless:
    """`{"state":"42"}`: the values after this one, which may have any number of digits."""

    value: str


@dataclass(frozen=True, slots=True)
class Begin:
    """`{"uuid":U,"params":{"count":N}}`: a new stateful stream."""

    uuid: str
    count: int


@dataclass(frozen=True, slots=True)
class Resume:
    """`{"uuid":U,"state":ID}`: the messages after this one."""

    uuid: str
    id: int


@dataclass(frozen=True, slots=True)
class Ack:
    """`{"uuid":U,"ack":ID}`: everything up to ID has arrived. Without uuid: the connection's."""

    uuid: str | None
    id: int


Request = BeginStateless | ResumeStateless | Begin | Resume | Ack


@dataclass(frozen=True, slots=True)
class Value:
    """`{"data":"154"}`: one value of a stateless stream."""

    data: str


@dataclass(frozen=True, slots=True)
class Item:
    """`{"id":1,"data":{"value":V}}`, with `crc` in the last one."""

    id: int
    value: int
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """`{"error":TEXT}`: the server's last words."""

    text: str


Reply = Value | Item | Refused
