"""A UDP port that reads and writes many datagrams per system call.

Linux can cut one large buffer into datagrams of one size (UDP_SEGMENT, "GSO") and glue
datagrams of one sender together (UDP_GRO). Both are used where the kernel has them; elsewhere,
and on a reactor that is not built on file descriptors, every datagram is one call.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from errno import EAGAIN, ECONNREFUSED, EINVAL, EIO, EMSGSIZE, ENOBUFS, EOPNOTSUPP, EWOULDBLOCK
from typing import Any, Protocol

from twisted.internet import udp
from twisted.internet.interfaces import IReactorFDSet, IReactorUDP
from twisted.logger import Logger

Address = tuple[str, int]
Datagrams = list[tuple[bytes, Address]]

SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
SO_RCVBUFFORCE = 33
SO_SNDBUFFORCE = 32
_SEGMENT_SIZE = struct.Struct("=H")  # cmsg of UDP_SEGMENT
_GRO_SIZE = struct.Struct("=i")  # cmsg of UDP_GRO
_ANCILLARY_BYTES = socket.CMSG_SPACE(_GRO_SIZE.size) if hasattr(socket, "CMSG_SPACE") else 0

READ_BYTES_MAX = 65_536
SEGMENTS_MAX = 64
SEGMENTED_BYTES_MAX = 65_000
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
DATAGRAMS_WAITING_MAX = 4_096
# Fairness: what one wake-up may read before other sockets have their turn.
WAKE_UP_BYTES_MAX = 512 * 1024
_WOULD_BLOCK = (EAGAIN, EWOULDBLOCK, ENOBUFS)
_NO_SEGMENTATION = (EIO, EINVAL, EOPNOTSUPP)


class BatchProtocol(Protocol):
    """What a protocol on a `BatchPort` has beside the methods of a DatagramProtocol."""

    def datagramReceived(self, datagram: bytes, addr: Any) -> None: ...

    def batch_ended(self) -> None:
        """All datagrams that were waiting have been handed over."""


def runs(datagrams: Datagrams) -> list[tuple[list[bytes], Address]]:
    """Cut a batch into runs that one segmented send can carry.

    Within a run all datagrams go to one address and have the size of the first one; only
    the last may be shorter.
    """
    found: list[tuple[list[bytes], Address]] = []
    run: list[bytes] = []
    address: Address | None = None
    size = total = 0
    for data, to in datagrams:
        length = len(data)
        if (
            to == address
            and length <= size
            and len(run[-1]) == size
            and len(run) < SEGMENTS_MAX
            and total + length <= SEGMENTED_BYTES_MAX
        ):
            run.append(data)
            total += length
        else:
            run, address, size, total = [data], to, length, length
            found.append((run, to))
    return found


class BatchPort(udp.Port):
    """`udp.Port` with `write_batch`, and one `batch_ended` per wake-up."""

    log = Logger()

    def startListening(self) -> None:
        self._bindSocket()  # type: ignore[no-untyped-call]
        self._waiting: deque[tuple[list[bytes], Address]] = deque()
        self._segments = hasattr(self.socket, "sendmsg") and self._has(UDP_SEGMENT, 0)
        self._coalesces = hasattr(self.socket, "recvmsg") and self._has(UDP_GRO, 1)
        self._enlarge_buffers()
        self._connectToProtocol()  # type: ignore[no-untyped-call]

    def doRead(self) -> None:
        read = 0
        try:
            while read < WAKE_UP_BYTES_MAX and self.connected:
                read += self._read_coalesced() if self._coalesces else self._read_one()
        except OSError as error:
            if error.errno not in (*_WOULD_BLOCK, ECONNREFUSED):
                raise
        finally:
            self.protocol.batch_ended()

    def write_batch(self, datagrams: Datagrams) -> None:
        """Send datagrams in order, in as few calls as the kernel allows."""
        if self._segments:
            pieces = runs(datagrams)
        else:
            pieces = [([data], address) for data, address in datagrams]
        if self._waiting:
            self._wait(pieces)
            return
        for index, (run, address) in enumerate(pieces):
            if not self._send_run(run, address):
                self._wait(pieces[index:])
                return

    def doWrite(self) -> None:
        """The socket has room again for what did not fit."""
        while self._waiting:
            run, address = self._waiting[0]
            if not self._send_run(run, address):
                return
            self._waiting.popleft()
        self.stopWriting()  # type: ignore[no-untyped-call]

    def _wait(self, pieces: list[tuple[list[bytes], Address]]) -> None:
        # QUIC repairs what is dropped here, so the bound costs speed and nothing else.
        self._waiting.extend(pieces[: max(0, DATAGRAMS_WAITING_MAX - len(self._waiting))])
        self.startWriting()  # type: ignore[no-untyped-call]

    def _send_run(self, run: list[bytes], address: Address) -> bool:
        """False if the socket is full. A datagram that cannot be sent counts as lost."""
        try:
            if len(run) == 1:
                self.socket.sendto(run[0], address)
            else:
                size = _SEGMENT_SIZE.pack(len(run[0]))
                self.socket.sendmsg(run, [(SOL_UDP, UDP_SEGMENT, size)], 0, address)
        except OSError as error:
            return self._send_failed(error, run, address)
        return True

    def _send_failed(self, error: OSError, run: list[bytes], address: Address) -> bool:
        if error.errno in _WOULD_BLOCK:
            return False
        if len(run) > 1 and error.errno in (*_NO_SEGMENTATION, EMSGSIZE):
            self._segments = self._segments and error.errno == EMSGSIZE
            for data in run:
                self._send_run([data], address)
            return True
        if error.errno != ECONNREFUSED:
            self.log.debug("A datagram could not be sent: {error}", error=error)
        return True

    def _read_one(self) -> int:
        data, address = self.socket.recvfrom(READ_BYTES_MAX)
        self.protocol.datagramReceived(data, address[:2])
        return len(data) or 1

    def _read_coalesced(self) -> int:
        data, ancillary, _, address = self.socket.recvmsg(READ_BYTES_MAX, _ANCILLARY_BYTES)
        address = address[:2]
        received = self.protocol.datagramReceived
        size = len(data)
        for level, kind, value in ancillary:
            if level == SOL_UDP and kind == UDP_GRO:
                size = _GRO_SIZE.unpack(value)[0]
        if size >= len(data):
            received(data, address)
        else:
            for start in range(0, len(data), size):
                received(data[start:start + size], address)
        return len(data) or 1

    def _has(self, option: int, value: int) -> bool:
        try:
            self.socket.setsockopt(SOL_UDP, option, value)
        except OSError:
            return False
        return True

    def _enlarge_buffers(self) -> None:
        """The default buffer holds some hundred datagrams: a burst of one fast client."""
        for forced, option in (
            (SO_RCVBUFFORCE, socket.SO_RCVBUF),
            (SO_SNDBUFFORCE, socket.SO_SNDBUF),
        ):
            for name in (forced, option):
                try:
                    self.socket.setsockopt(socket.SOL_SOCKET, name, SOCKET_BUFFER_BYTES)
                    break
                except OSError:
                    continue


def listen_udp(reactor: Any, port: int, protocol: Any, interface: str) -> Any:
    """A batching port where the reactor can have one, else the reactor's own."""
    if IReactorFDSet.providedBy(reactor):
        port_class: Any = BatchPort
        batch_port = port_class(port, protocol, interface, READ_BYTES_MAX, reactor)
        batch_port.startListening()
        return batch_port
    return IReactorUDP(reactor).listenUDP(port, protocol, interface, READ_BYTES_MAX)
