"""Who may do what over HTTP."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import ConfigError
from multibroker.web.plugin import HttpWire, is_loopback
from multibroker.web.tokens import FILE_NAME, Role, admin_token, own_tokens, read_tokens
from tests.web.support import ADMIN, READER, World

PUBLISH = ("POST", "/api/topics/t/messages", {"payload": "hi"})


class LoopbackTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.world = World(Path(self.mktemp())).start()

    def test_reading_is_open(self) -> None:
        self.assertEqual(self.world.ask("GET", "/api/topics").status, 200)
        self.assertEqual(self.world.ask("GET", "/metrics").status, 200)

    def test_changing_needs_the_admin_role(self) -> None:
        self.assertEqual(self.world.ask(*PUBLISH).status, 403)
        self.assertEqual(self.world.ask(*PUBLISH, token=READER).status, 403)
        self.assertEqual(self.world.ask(*PUBLISH, token="nonsense").status, 403)
        self.assertEqual(self.world.ask(*PUBLISH, token=ADMIN).status, 200)

    def test_another_sites_page_cannot_change_anything(self) -> None:
        answer = self.world.ask(*PUBLISH, token=ADMIN, origin="http://evil.example")
        self.assertEqual(answer.status, 403)
        same = self.world.ask(*PUBLISH, token=ADMIN, origin="http://127.0.0.1:8080")
        self.assertEqual(same.status, 200)

    def test_a_form_post_is_refused(self) -> None:
        form = "application/x-www-form-urlencoded"
        self.assertEqual(self.world.ask(*PUBLISH, token=ADMIN, content_type=form).status, 415)

    def test_a_rebound_host_name_is_refused(self) -> None:
        answer = self.world.ask("GET", "/api/topics", host="evil.example:8080")
        self.assertEqual(answer.status, 403)
        for host in ("localhost:8080", "127.0.0.1:8080", "[::1]:8080"):
            self.assertEqual(self.world.ask("GET", "/api/topics", host=host).status, 200)

    def test_every_answer_carries_the_strict_headers(self) -> None:
        for path in ("/", "/static/console.js", "/api/topics", "/nothing", "/metrics"):
            headers = self.world.ask("GET", path).headers
            self.assertIn("default-src 'none'", headers["content-security-policy"], path)
            self.assertNotIn("unsafe", headers["content-security-policy"])
            self.assertEqual(headers["x-content-type-options"], "nosniff")


class RemoteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.world = World(Path(self.mktemp()), ("tcp:8080",)).start()

    def test_everything_but_health_and_the_page_itself_needs_a_token(self) -> None:
        for path in ("/api/topics", "/metrics", "/api/events"):
            answer = self.world.ask("GET", path)
            self.assertEqual(answer.status, 401, path)
            self.assertIn("Bearer", answer.headers["www-authenticate"])
        for path in ("/healthz", "/readyz", "/", "/static/console.css"):
            self.assertEqual(self.world.ask("GET", path).status, 200, path)

    def test_a_reader_may_read_and_an_admin_may_change(self) -> None:
        self.assertEqual(self.world.ask("GET", "/api/topics", token=READER).status, 200)
        self.assertEqual(self.world.ask(*PUBLISH, token=READER).status, 403)
        self.assertEqual(self.world.ask(*PUBLISH, token=ADMIN).status, 200)
        self.assertEqual(self.world.ask("GET", "/api/whoami", token=ADMIN).json["role"], "admin")

    def test_without_a_token_file_it_does_not_start(self) -> None:
        self.world.settings["token-file"] = None
        error = self.assertRaises(ConfigError, HttpWire().factory, self.world.services)
        self.assertIn("--http-token-file", str(error))


class TokenFileTests(SynchronousTestCase):
    def test_the_brokers_own_token_is_private_and_stays(self) -> None:
        directory = Path(self.mktemp())
        tokens = own_tokens(directory)
        self.assertEqual((directory / FILE_NAME).stat().st_mode & 0o777, 0o600)
        self.assertEqual(own_tokens(directory), tokens)
        token = admin_token(directory / FILE_NAME)
        assert token is not None
        self.assertEqual(tokens.role_of(token.encode()), Role.ADMIN)
        self.assertEqual(tokens.role_of(b""), Role.NOBODY)

    def test_a_bad_line_is_named(self) -> None:
        path = Path(self.mktemp())
        for text in ("root abcdefghijklmnopq", "admin short", "admin"):
            path.write_text(f"# comment\n{text}\n")
            error = self.assertRaises(ConfigError, read_tokens, path)
            self.assertIn("line 2", str(error))
        path.write_text("\n")
        self.assertRaises(ConfigError, read_tokens, path)

    def test_loopback_is_recognised(self) -> None:
        for endpoint in (
            "tcp:8080:interface=127.0.0.1",
            "tcp:8080:interface=\\:\\:1",
            "tcp:port=8080:interface=localhost",
            "unix:/run/multibroker.sock",
        ):
            self.assertTrue(is_loopback(endpoint), endpoint)
        for endpoint in ("tcp:8080", "tcp:8080:interface=0.0.0.0", "tcp:8080:interface=10.0.0.1"):
            self.assertFalse(is_loopback(endpoint), endpoint)
