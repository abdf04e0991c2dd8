"""What the plugin tells a newcomer."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.fujin.plugin import FujinWire
from multibroker.quic.certificates import development_certificate


class FirstMessageTests(SynchronousTestCase):
    def test_the_development_certificate_is_named_where_it_is_used(self) -> None:
        data_dir = Path(self.mktemp())
        self.assertNotIn("--ca", FujinWire().first_message(data_dir))
        certificate, _ = development_certificate(data_dir)
        self.assertTrue(FujinWire().first_message(data_dir).endswith(f" --ca {certificate}"))
