"""Registers Figg; all logic is in multibroker.protocols.figg."""

from multibroker.protocols.figg.plugin import FiggWire

figg = FiggWire()
