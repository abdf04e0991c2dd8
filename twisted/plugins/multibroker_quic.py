"""Registers `quic:` with Twisted's endpoint strings, for servers and for clients."""

from multibroker.quic.strings import QuicClientParser, QuicServerParser

quic_server_parser = QuicServerParser()
quic_client_parser = QuicClientParser()
