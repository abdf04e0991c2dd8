"""Bytes of a stream until they make a frame."""

from __future__ import annotations

from collections.abc import Sequence


class FrameBuffer:
    """Holds an unfinished frame as the pieces that came, and joins them only when it is worth it.

    A frame of a megabyte arrives in a thousand reads: joining at each of them would copy
    half a gigabyte. So the reader says how many bytes it needs to get anywhere (`keep`), and
    sees nothing until they are there. Only what has arrived is held, whatever a length claims.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._held = 0
        self._needed = 0

    def __len__(self) -> int:
        return self._held

    def take(self, pieces: Sequence[bytes]) -> bytes | None:
        """All that is held with `pieces` behind it, or None if it is still too little."""
        if not self._pieces and len(pieces) == 1:
            return pieces[0]
        self._pieces += pieces
        self._held += sum(map(len, pieces))
        if self._held < self._needed:
            return None
        whole = b"".join(self._pieces)
        self._pieces.clear()
        self._held = self._needed = 0
        return whole

    def keep(self, rest: bytes, needed: int) -> None:
        """What could not be read yet; nothing new can be read before `needed` bytes are there."""
        if rest:
            self._pieces.append(rest)
            self._held = len(rest)
            self._needed = needed
