"""The packets that an endpoint sends without having a connection."""

from __future__ import annotations

import os

from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder

_CLOSE_FRAME_CAPACITY = 1 + 3 * 8
# RFC 9000, 10.3: below 21 bytes a reset could not look like a packet; it must also be
# smaller than what it answers, or two endpoints could answer each other for ever.
RESET_BYTES_MIN = 21
RESET_BYTES_MAX = 43


def initial_close(
    version: int, client_cid: bytes, client_source_cid: bytes, code: QuicErrorCode
) -> bytes:
    """An Initial packet that refuses a client's first packet with an error code.

    The keys follow from `client_cid`, the destination that the client had chosen.
    """
    crypto = CryptoPair()
    crypto.setup_initial(cid=client_cid, is_client=False, version=version)
    builder = QuicPacketBuilder(
        host_cid=client_cid,
        is_client=False,
        max_datagram_size=SMALLEST_MAX_DATAGRAM_SIZE,
        peer_cid=client_source_cid,
        version=version,
    )
    builder.start_packet(QuicPacketType.INITIAL, crypto)
    frame = builder.start_frame(QuicFrameType.TRANSPORT_CLOSE, capacity=_CLOSE_FRAME_CAPACITY)
    for value in (code, QuicFrameType.PADDING, 0):
        frame.push_uint_var(value)
    datagrams, _ = builder.flush()
    return datagrams[0]


def stateless_reset(token: bytes, answered_bytes: int) -> bytes | None:
    """A datagram that ends a connection we know nothing of, or None if it would be too short."""
    size = min(answered_bytes - 1, RESET_BYTES_MAX)
    if size < RESET_BYTES_MIN:
        return None
    noise = bytearray(os.urandom(size - len(token)))
    noise[0] = noise[0] & 0x3F | 0x40  # looks like a packet with a short header
    return bytes(noise) + token
