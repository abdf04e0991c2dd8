from multibroker.web.plugin import HttpWire

http = HttpWire()
