"""`quic:` endpoint strings, the plugin that registers them, and the development certificate."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import clientFromString, serverFromString
from twisted.internet.interfaces import (
    IStreamClientEndpoint,
    IStreamServerEndpoint,
    IStreamServerEndpointStringParser,
)
from twisted.plugin import getPlugins
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from multibroker.quic.certificates import CERTIFICATE_NAME, KEY_NAME, development_certificate
from multibroker.quic.endpoints import QuicClientEndpoint, QuicServerEndpoint
from multibroker.quic.errors import QuicEndpointError
from tests.quic.network import Network, Pair, RecordingFactory, certificate


class StringTests(TestCase):
    def server(self, description: str) -> QuicServerEndpoint:
        endpoint = serverFromString(Network(), description)
        assert isinstance(endpoint, QuicServerEndpoint)
        return endpoint

    def test_the_plugin_is_found_by_twisted(self) -> None:
        prefixes = [plugin.prefix for plugin in getPlugins(IStreamServerEndpointStringParser)]
        self.assertIn("quic", prefixes)

    def test_a_server_string_says_everything(self) -> None:
        endpoint = self.server(
            "quic:4848:interface=127.0.0.1:certKey=c.pem:privateKey=k.pem:alpn=fujin,h3"
            ":clientCA=ca.pem:idleTimeout=7.5:maxStreams=5:maxConnections=6:retry=0"
        )
        verifyObject(IStreamServerEndpoint, endpoint)
        settings = endpoint.settings
        self.assertEqual((endpoint.port, endpoint.interface), (4848, "127.0.0.1"))
        self.assertEqual((settings.certificate, settings.private_key), ("c.pem", "k.pem"))
        self.assertEqual((settings.alpn, settings.client_ca), (("fujin", "h3"), "ca.pem"))
        limits = settings.limits
        self.assertEqual((limits.idle_timeout_s, limits.streams_bidirectional_max), (7.5, 5))
        self.assertEqual((limits.connections_max, limits.half_open_before_retry), (6, 0))

    def test_a_client_string_says_everything(self) -> None:
        endpoint = clientFromString(
            Network(),
            "quic:example.org:4848:alpn=fujin:caCerts=ca.pem:serverName=s:verify=no"
            ":certKey=c.pem:privateKey=k.pem:timeout=3",
        )
        assert isinstance(endpoint, QuicClientEndpoint)
        verifyObject(IStreamClientEndpoint, endpoint)
        settings = endpoint.settings
        self.assertEqual((endpoint.host, endpoint.port), ("example.org", 4848))
        self.assertEqual((settings.server_ca, settings.server_name), ("ca.pem", "s"))
        self.assertEqual((settings.certificate, settings.private_key), ("c.pem", "k.pem"))
        self.assertFalse(settings.verify_server)
        self.assertEqual(settings.limits.handshake_timeout_s, 3)

    def test_mistakes_are_named(self) -> None:
        for description, hint in (
            ("quic:4848", "certKey"),
            ("quic:x:certKey=c", "port"),
            ("quic:1:certKey=c:colour=red", "colour"),
            ("quic:1:certKey=c:maxStreams=-1", "maxStreams"),
            ("quic:1:certKey=c:idleTimeout=soon", "idleTimeout"),
        ):
            error = self.assertRaises(QuicEndpointError, self.server, description)
            self.assertIn(hint, str(error))
        error = self.assertRaises(
            QuicEndpointError, clientFromString, Network(), "quic:h:1:verify=maybe"
        )
        self.assertIn("verify", str(error))

    def test_a_certificate_that_is_not_there_fails_to_listen(self) -> None:
        result: list[Any] = []
        endpoint = self.server("quic:0:certKey=/nowhere/c.pem:privateKey=/nowhere/k.pem")
        endpoint.listen(RecordingFactory()).addBoth(result.append)
        self.assertTrue(result[0].check(FileNotFoundError))

    def test_an_authority_that_cannot_be_read_fails_to_listen(self) -> None:
        cert, key = certificate()
        empty = Path(self.mktemp())
        empty.write_bytes(b"nothing")
        for path, error in (("/nowhere/ca.pem", FileNotFoundError), (empty, QuicEndpointError)):
            result: list[Any] = []
            endpoint = self.server(f"quic:0:certKey={cert}:privateKey={key}:clientCA={path}")
            endpoint.listen(RecordingFactory()).addBoth(result.append)
            self.assertTrue(result[0].check(error))

    def test_a_name_is_resolved(self) -> None:
        class Resolver:
            def resolveHostName(self, receiver: Any, host: str, port: int) -> None:
                receiver.resolutionBegan(None)
                if host == "server.test":
                    receiver.addressResolved(type("A", (), {"host": "10.0.0.1"}))
                receiver.resolutionComplete()

        pair = Pair()
        pair.network.nameResolver = Resolver()  # type: ignore[attr-defined]
        settings = pair.endpoint().settings
        result: list[Any] = []
        for host in ("server.test", "nobody.test"):
            endpoint = QuicClientEndpoint(pair.network, host, 4848, settings)
            endpoint.connect_quic(RecordingFactory()).addBoth(result.append)
        pair.network.run_until(lambda: len(result) == 2)
        self.assertIn("nobody.test", result[0].getErrorMessage())
        self.assertTrue(result[1].established)


class CertificateTests(TestCase):
    def test_it_is_made_once_and_kept(self) -> None:
        directory = Path(self.mktemp())
        first = development_certificate(directory)
        content = [path.read_bytes() for path in first]
        self.assertEqual(development_certificate(directory), first)
        self.assertEqual([path.read_bytes() for path in first], content)
        self.assertEqual(
            sorted(path.name for path in directory.iterdir()), sorted([CERTIFICATE_NAME, KEY_NAME])
        )

    def test_nobody_else_can_read_the_key(self) -> None:
        _, key = development_certificate(Path(self.mktemp()))
        self.assertEqual(stat.S_IMODE(key.stat().st_mode), 0o600)

    def test_an_endpoint_with_certdir_works_without_any_certificate(self) -> None:
        directory = Path(self.mktemp())
        endpoint = serverFromString(
            Network(), f"quic:4848:interface=10.0.0.1:alpn=test:certDir={directory}"
        )
        found: list[Any] = []
        endpoint.listen(RecordingFactory()).addBoth(found.append)
        self.assertEqual(found[0].getHost().port, 4848)
        self.assertTrue((directory / CERTIFICATE_NAME).exists())

    def test_the_certificate_is_valid_for_the_loopback(self) -> None:
        pair = Pair()
        self.assertEqual(certificate()[0], pair.cert)
        self.assertTrue(pair.connect(server_name="127.0.0.1").established)
