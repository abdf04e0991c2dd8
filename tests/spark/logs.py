"""Random logs for the Spark tests, as bundles and as hypothesis strategies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from multibroker import bundle
from multibroker.records import Bundle

PAYLOADS = st.one_of(
    st.binary(max_size=12),
    st.integers(0, 300).map(lambda size: b"x" * size),
    st.integers(120, 140).map(lambda size: b"\xff" * size),
)
TIMES = st.one_of(st.integers(0, 2**64 - 1), st.integers(1_700_000_000_000, 1_700_000_000_003))
HEADERS = st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=9)), max_size=2).map(tuple)


@st.composite
def _bundle(draw: Any, next_seq: int) -> Bundle:
    count = draw(st.one_of(st.integers(1, 5), st.integers(14, 18), st.just(130)))
    some_payloads = draw(st.lists(PAYLOADS, min_size=1, max_size=4))
    payloads = [draw(PAYLOADS)] + [some_payloads[i % len(some_payloads)] for i in range(count - 1)]
    keys = seqs = times = None
    if draw(st.booleans()):
        some = draw(st.lists(st.none() | st.binary(max_size=6), min_size=1, max_size=5))
        keys = [some[i % len(some)] for i in range(count)]
    if draw(st.booleans()):
        some_times = draw(st.lists(TIMES, min_size=1, max_size=5))
        times = [some_times[i % len(some_times)] for i in range(count)]
    if draw(st.integers(0, 3)) == 0:
        gaps = draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
        seqs, seq = [], next_seq - 1
        for i in range(count):
            seq += 1 + gaps[i % len(gaps)]
            seqs.append(seq)
    some_headers = draw(st.none() | st.lists(HEADERS, min_size=1, max_size=3))
    headers = some_headers and [some_headers[i % len(some_headers)] for i in range(count)]
    return bundle.encode(
        payloads,
        draw(TIMES),
        keys=keys,
        timestamps_ms=times,
        seqs=seqs,
        headers=headers,
        shared_headers=draw(HEADERS),
        compress=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def chunks(draw: Any) -> tuple[int, list[Bundle]]:
    """A first sequence number and the bundles from there on."""
    first = draw(st.one_of(st.integers(1, 9), st.integers(2**62 - 50, 2**62 + 50)))
    next_seq = first
    made = []
    repeat = draw(st.sampled_from([1, 1, 60]))
    for _ in range(draw(st.integers(1, 5))):
        one = draw(_bundle(next_seq))
        for _ in range(repeat if not one.first_seq else 1):
            made.append(one)
            next_seq = one.span(next_seq)[1] + 1
    return first, made


def joined(first: int, bundles: list[Bundle]) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The chunk's bytes and its header blocks by first sequence number."""
    blocks = []
    next_seq = first
    for one in bundles:
        start, last = one.span(next_seq)
        if one.headers:
            blocks.append((start, one.headers))
        next_seq = last + 1
    return b"".join(one.framed for one in bundles), blocks
