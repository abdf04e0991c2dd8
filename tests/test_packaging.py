"""What operators install must follow the code, or these fail."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from multibroker import tap
from multibroker.cli.config import example
from multibroker.config import build
from multibroker.web.metrics import BrokerCollector
from tests.web.support import World

PACKAGING = Path(__file__).parent.parent / "packaging"


class ExampleFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.schema = tap.sections(tap.find_wires())
        self.text = (PACKAGING / "multibroker.toml").read_text()

    def test_the_example_is_the_schema(self) -> None:
        """When this fails: `multibroker config example > packaging/multibroker.toml`."""
        self.assertEqual(self.text, example(self.schema))

    def test_every_line_of_the_example_may_be_uncommented(self) -> None:
        uncommented = re.sub(r"^# ([\w.-]+ = .*|\[.*\])$", r"\1", self.text, flags=re.M)
        document = tomllib.loads(re.sub(r'^.* = ""$', "", uncommented, flags=re.M))
        config = build(self.schema, {}, document, tap.FREE_TABLES)
        self.assertEqual(config["storage"], build(self.schema, {}, {})["storage"])
        (topic,) = tap.declared_topics(config)
        self.assertEqual((topic.name, topic.partitions), (b"orders", 4))


class MonitoringTests(SynchronousTestCase):
    def metrics(self) -> set[str]:
        world = World(Path(self.mktemp())).start()
        collector = BrokerCollector(world.broker, 10, lambda: 0)
        return {family.name for family in collector.collect()}

    def used(self, text: str) -> set[str]:
        names = set(re.findall(r"\bmultibroker_\w+", text))
        return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}

    def test_the_dashboard_and_the_alerts_name_metrics_that_exist(self) -> None:
        known = self.metrics()
        dashboard = json.loads((PACKAGING / "grafana.json").read_text())
        for expression in expressions(dashboard):
            self.assertLessEqual(self.used(expression), known, expression)
        alerts = (PACKAGING / "alerts.yml").read_text()
        self.assertTrue(self.used(alerts))
        self.assertLessEqual(self.used(alerts), known)


def expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "expr" in node:
            yield node["expr"]
        for value in node.values():
            yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)
