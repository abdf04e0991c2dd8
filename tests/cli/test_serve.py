"""What `multibroker serve` writes to a terminal."""

from __future__ import annotations

from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli.serve import terminal_line


class TerminalLineTests(SynchronousTestCase):
    def line(self, text: str, namespace: str, level: object = LogLevel.info) -> str | None:
        return terminal_line(
            {"log_format": text, "log_namespace": namespace, "log_level": level, "log_time": 0.0}
        )

    def test_our_own_lines_are_short(self) -> None:
        line = self.line("figg listening", "multibroker.service.BrokerService")
        assert line is not None
        self.assertRegex(line, r"^\d\d:\d\d:\d\d  figg listening\n$")

    def test_chatter_of_the_framework_is_left_out_but_not_its_warnings(self) -> None:
        self.assertIsNone(self.line("Main loop terminated.", "twisted.internet.base"))
        warning = self.line("odd", "twisted.internet.tcp", LogLevel.warn)
        assert warning is not None
        self.assertIn("warn: odd", warning)

    def test_braces_in_a_text_do_no_harm(self) -> None:
        self.assertIsNotNone(self.line("{not a field", "multibroker.x", LogLevel.error))
