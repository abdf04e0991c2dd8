"""Slows down the guessing of keys: failed attempts are counted per address.

An address that failed `failures_max` times within the window is refused, right key or not,
until its oldest failures leave the window. IPv6 addresses count by their /64 network, which
is what one customer has. The table is bounded; when it is full, the address that failed
longest ago is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from ipaddress import IPv6Address, ip_network
from typing import Any

ADDRESSES_MAX = 10_000


def address_of(peer: Any) -> str | None:
    """What failures are counted by; None for a Unix socket, whose file has permissions."""
    host = getattr(peer, "host", None)
    if host is None:
        return None
    if ":" not in host:
        return str(host)
    plain = IPv6Address(host.partition("%")[0])
    if plain.ipv4_mapped is not None:
        return str(plain.ipv4_mapped)
    return str(ip_network((plain, 64), strict=False))


class Throttle:
    """Failed attempts within the last `window_secs`, by address."""

    def __init__(self, clock: Any, failures_max: int, window_secs: int) -> None:
        self._clock = clock
        self._failures_max = failures_max
        self._window_secs = window_secs
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def refuses(self, address: str | None) -> bool:
        if address is None or not self._failures_max:
            return False
        times = self._failures.get(address)
        if times is None:
            return False
        oldest = self._clock.seconds() - self._window_secs
        while times and times[0] <= oldest:
            times.popleft()
        if not times:
            del self._failures[address]
        return len(times) >= self._failures_max

    def failed(self, address: str | None) -> None:
        if address is None or not self._failures_max:
            return
        times = self._failures.setdefault(address, deque(maxlen=self._failures_max))
        times.append(self._clock.seconds())
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
