"""Registers the reliable stream; all logic is in multibroker.protocols.reliable."""

from multibroker.protocols.reliable.plugin import ReliableWire

reliable = ReliableWire()
