"""Sets of sequence numbers as sorted (first, last) pairs: a million messages in one pair."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Spans = list[tuple[int, int]]


def of_seqs(seqs: NDArray[np.int64]) -> Spans:
    """Runs of neighbours, in the order given; equal or falling numbers start a new run."""
    if not len(seqs):
        return []
    (breaks,) = np.nonzero(np.diff(seqs) != 1)
    firsts = seqs[np.concatenate([[0], breaks + 1])]
    lasts = seqs[np.concatenate([breaks, [len(seqs) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist()))


def union(spans: Iterable[tuple[int, int]]) -> tuple[Spans, Spans]:
    """The numbers in any span, and those in more than one."""
    merged: Spans = []
    twice: Spans = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            twice.append((first, min(last, merged[-1][1])))
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged, twice


def minus(left: Spans, right: Spans) -> Spans:
    """What is in `left` and not in `right`; both merged."""
    result: Spans = []
    place = 0
    for first, last in left:
        while place < len(right) and right[place][1] < first:
            place += 1
        here = place
        while here < len(right) and right[here][0] <= last:
            if right[here][0] > first:
                result.append((first, right[here][0] - 1))
            first = right[here][1] + 1
            here += 1
        if first <= last:
            result.append((first, last))
    return result


def within(spans: Spans, first: int, last: int) -> Spans:
    return [(max(a, first), min(b, last)) for a, b in spans if b >= first and a <= last]


def size(spans: Spans) -> int:
    return sum(last - first + 1 for first, last in spans)
