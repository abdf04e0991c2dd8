from multibroker.protocols.tank.plugin import TankWire

tank = TankWire()
