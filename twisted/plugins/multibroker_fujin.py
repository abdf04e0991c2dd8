"""Registers Fujin; all logic is in multibroker.protocols.fujin."""

from multibroker.protocols.fujin.plugin import FujinWire

fujin = FujinWire()
