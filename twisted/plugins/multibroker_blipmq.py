from multibroker.protocols.blipmq.plugin import BlipmqWire

blipmq = BlipmqWire()
