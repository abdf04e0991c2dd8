"""The two applications that the protocol carries: checked random numbers and doubled numbers."""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from multibroker.protocols.reliable.twister import Draws, numpy_draws, pure_draws, update_crc

State = dict[str, int]

# A turn of the reactor spent on drawing should take about a millisecond.
_FAST_BATCH = 512
_PURE_BATCH = 32


class RandomNumbers:
    """The stateful application: state `{count, value, crc}`, data `{value}` or `{value, crc}`.

    `batch` is how many draws are a fair share of a reactor turn.
    """

    def __init__(self, draws: Draws | None = None) -> None:
        self._given = draws

    @cached_property
    def _fast(self) -> Draws | None:
        """Looked for at the first draw: numpy is a good part of an idle broker's memory."""
        return self._given or numpy_draws()

    @cached_property
    def _draws(self) -> Draws:
        return self._fast or pure_draws

    @property
    def batch(self) -> int:
        return _FAST_BATCH if self._fast else _PURE_BATCH

    def begin(self, count: int, seed: int) -> State:
        return {"count": count, "value": seed, "crc": 0}

    def bulk(self, state: State, count: int) -> tuple[Sequence[str], State]:
        """A bulk transform for `ISessions.put_many`; short when the stream has ended."""
        left = state["count"]
        count = min(count, left)
        if not count:
            return [], state
        values = self._draws(state["value"], count)
        crc = update_crc(state["crc"], values)
        texts = [f'{{"value":{value}}}' for value in values]
        # The count tells the end; the CRC may well be 0 there (reliable.md, facts).
        if count == left:
            texts[-1] = f'{{"value":{values[-1]},"crc":{crc}}}'
        return texts, {"count": left - count, "value": values[-1], "crc": crc}

    def one(self, state: State) -> tuple[dict[str, int], State]:
        """The transform of the specification, for `ISessions.put`."""
        (value,) = self._draws(state["value"], 1)
        crc = update_crc(state["crc"], [value])
        data = {"value": value, "crc": crc} if state["count"] == 1 else {"value": value}
        return data, {"count": state["count"] - 1, "value": value, "crc": crc}


# CPython refuses to print an int of more than 4,300 digits and takes quadratic time below that;
# a Decimal with room for every digit is exact and takes linear time.
EXACT: Any = decimal.Context(
    prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[decimal.Inexact]
)


class Doubling:
    """The stateless application: each value is twice the one before, without end."""

    def __init__(self, value: decimal.Decimal) -> None:
        self._value = value

    @classmethod
    def begin(cls, first: int) -> Doubling:
        doubling = cls(decimal.Decimal(first))
        doubling._pending = True
        return doubling

    @classmethod
    def resume(cls, last: str) -> Doubling:
        return cls(EXACT.create_decimal(last))

    _pending = False

    def lines(self, count: int, bytes_max: int) -> tuple[int, bytes]:
        """Up to `count` lines, no more than one of them beyond `bytes_max`; how many, and them."""
        value, add = self._value, EXACT.add
        lines: list[str] = []
        size = 0
        while len(lines) < count and size < bytes_max:
            if self._pending:
                self._pending = False
            else:
                value = add(value, value)
            line = f'{{"data":"{value}"}}\n'
            size += len(line)
            lines.append(line)
        self._value = value
        return len(lines), "".join(lines).encode()

    @property
    def digits(self) -> int:
        return self._value.adjusted() + 1
