"""Every endpoint of the JSON API, health and metrics, on a broker in memory."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from twisted.logger import Logger
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from tests.web.support import ADMIN, World


class ApiCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.world = World(Path(self.mktemp())).start()
        self.ask = self.world.ask

    def publish(self, topic: bytes, *payloads: bytes) -> None:
        encoded = bundle.encode(payloads, 1_700_000_000_000)
        self.successResultOf(self.world.broker.publish(topic, [encoded]))


class TopicTests(ApiCase):
    def test_a_topic_is_created_configured_and_deleted(self) -> None:
        created = self.ask(
            "POST",
            "/api/topics",
            {"name": "orders", "partitions": 2, "config": {"log.retention.secs": "1w"}},
            token=ADMIN,
        )
        self.assertEqual((created.status, created.json["path"]), (200, "orders"))
        self.assertEqual(len(created.json["partitions"]), 2)
        details = self.ask("GET", "/api/topics/orders").json
        self.assertEqual(details["config"]["log.retention.secs"], "604800")
        changes = {"config": {"log.segment.bytes": "1mb"}}
        changed = self.ask("PATCH", "/api/topics/orders", changes, token=ADMIN)
        self.assertEqual(changed.json["config"]["log.segment.bytes"], str(2**20))
        self.assertEqual(changed.json["config"]["log.retention.secs"], "604800")
        self.assertEqual(self.ask("DELETE", "/api/topics/orders", token=ADMIN).status, 200)
        self.assertEqual(self.ask("GET", "/api/topics/orders").status, 404)

    def test_what_is_wrong_is_said(self) -> None:
        for document, status, words in (
            ({"partitions": 1}, 400, "name"),
            ({"name": "x", "partitions": 0}, 400, "partitions"),
            ({"name": "x", "partitions": "two"}, 400, "partitions"),
            ({"name": "x", "config": {"no.such": "1"}}, 400, "no.such"),
            ({"name": "x", "config": []}, 400, "config"),
            ({"name": "__mine"}, 400, "__"),
        ):
            answer = self.ask("POST", "/api/topics", document, token=ADMIN)
            self.assertEqual(answer.status, status, document)
            self.assertIn(words, answer.json["error"])
        self.publish(b"there", b"1")
        again = self.ask("POST", "/api/topics", {"name": "there"}, token=ADMIN)
        self.assertEqual(again.status, 409)

    def test_any_bytes_make_a_name(self) -> None:
        self.publish(b"a/b \xff\x00", b"1")
        row = self.ask("GET", "/api/topics").json[0]
        self.assertEqual(row["name"], "a/b \\xff\x00")
        self.assertEqual(row["path"], "a%2Fb%20%FF%00")
        self.assertEqual(self.ask("GET", f"/api/topics/{row['path']}").json["name"], row["name"])

    def test_ranges_sizes_and_counters_are_those_of_the_core(self) -> None:
        self.publish(b"t", b"one", b"two")
        row = self.ask("GET", "/api/topics").json[0]
        part = row["partitions"][0]
        self.assertEqual((part["first"], part["last"], row["messages_in"]), (1, 2, 2))
        self.assertEqual(part["bytes"], row["bytes_in"])


class MessageTests(ApiCase):
    def test_what_is_published_is_read_back(self) -> None:
        for document in (
            {"payload": "text", "key": "k", "headers": {"h": "v"}},
            {"payload_json": {"a": 1}},
            {"payload_base64": "/wA="},
        ):
            answer = self.ask("POST", "/api/topics/t/messages", document, token=ADMIN)
            self.assertEqual(answer.status, 200)
        answer = self.ask("GET", "/api/topics/t/messages").json
        first, second, third = answer["messages"]
        self.assertEqual((first["seq"], first["text"], first["key"]), (1, "text", "k"))
        self.assertEqual(first["headers"], [["h", "v"]])
        self.assertEqual(second["text"], '{"a":1}')
        self.assertEqual(third["base64"], "/wA=")

    def test_a_page_starts_where_it_is_asked_to(self) -> None:
        self.publish(b"t", *(str(n).encode() for n in range(1, 11)))
        self.publish(b"t", *(str(n).encode() for n in range(11, 21)))

        def seqs(query: str) -> list[int]:
            messages = self.ask("GET", f"/api/topics/t/messages?{query}").json["messages"]
            return [message["seq"] for message in messages]

        self.assertEqual(seqs("from=9&limit=4"), [9, 10, 11, 12])
        self.assertEqual(seqs("limit=3"), [18, 19, 20])
        self.assertEqual(seqs("from=99"), [])
        self.assertEqual(self.ask("GET", "/api/topics/t/messages?from=x").status, 400)
        self.assertEqual(self.ask("GET", "/api/topics/t/messages?partition=1").status, 404)

    def test_long_payloads_are_cut_and_say_so(self) -> None:
        self.publish(b"t", b"x" * 100_000)
        message = self.ask("GET", "/api/topics/t/messages").json["messages"][0]
        self.assertTrue(message["cut"])
        self.assertEqual((message["size"], len(message["text"])), (100_000, 65_536))

    def test_bad_bodies_are_refused(self) -> None:
        for document in (
            {},
            {"payload": 1},
            {"payload_base64": "!"},
            [],
            {"payload": "", "key": "k" * 256},
        ):
            answer = self.ask("POST", "/api/topics/t/messages", document, token=ADMIN)
            self.assertEqual(answer.status, 400, document)


class StreamTests(ApiCase):
    def test_the_tail_shows_new_messages_only(self) -> None:
        self.publish(b"t", b"old")
        tail = self.world.open("GET", "/api/topics/t/tail")
        self.publish(b"t", b"<b>new</b>")
        names = [name for name, _ in tail.events]
        self.assertEqual(names, ["start", "messages"])
        (message,) = tail.events[1][1]["messages"]
        self.assertEqual((message["seq"], message["text"]), (2, "<b>new</b>"))

    def test_the_tail_replays_from_where_it_was_paused(self) -> None:
        self.publish(b"t", b"1", b"2", b"3")
        tail = self.world.open("GET", "/api/topics/t/tail?after=1")
        self.world.clock.pump([0.01] * 5)
        seqs = [
            m["seq"] for name, data in tail.events if name == "messages" for m in data["messages"]
        ]
        self.assertEqual(seqs, [2, 3])

    def test_of_a_burst_only_the_newest_are_shown(self) -> None:
        self.publish(b"t", b"0")
        tail = self.world.open("GET", "/api/topics/t/tail")
        self.publish(b"t", *[b"x"] * 250)
        data = tail.events[-1][1]
        self.assertEqual((data["left_out"], len(data["messages"])), (150, 100))
        self.assertEqual(data["messages"][-1]["seq"], 251)

    def test_a_tab_that_does_not_read_is_sent_nothing(self) -> None:
        self.publish(b"t", b"0")
        tail = self.world.open("GET", "/api/topics/t/tail")
        tail.transport.producer.pauseProducing()
        before = tail.transport.value()
        for _ in range(10):
            self.publish(b"t", b"x")
        self.world.clock.pump([0.01] * 5)
        self.assertEqual(tail.transport.value(), before)

    def test_a_closed_tab_leaves_nothing_behind(self) -> None:
        self.publish(b"t", b"0")
        partition = self.world.broker.topic(b"t").partitions[0]  # type: ignore[union-attr]
        tail = self.world.open("GET", "/api/topics/t/tail")
        ticks = self.world.open("GET", "/api/events")
        self.assertEqual(len(partition.watches), 1)
        tail.hang_up()
        ticks.hang_up()
        self.assertEqual(len(partition.watches), 0)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_deleting_the_topic_ends_the_tail(self) -> None:
        self.publish(b"t", b"0")
        tail = self.world.open("GET", "/api/topics/t/tail")
        self.ask("DELETE", "/api/topics/t", token=ADMIN)
        self.assertEqual(tail.events[-1][0], "failed")

    def test_ticks_come_once_a_second(self) -> None:
        stream = self.world.open("GET", "/api/events")
        self.world.clock.pump([1.0] * 3)
        ticks = [data for name, data in stream.events if name == "tick"]
        self.assertEqual([tick["time"] - ticks[0]["time"] for tick in ticks], [0, 1, 2, 3])
        stream.transport.producer.pauseProducing()
        self.world.clock.pump([1.0] * 3)
        self.assertEqual(len(stream.events), 4)


class OperatorTests(ApiCase):
    def test_health_follows_the_life_of_the_broker(self) -> None:
        world = World(Path(self.mktemp()))
        self.assertEqual(world.ask("GET", "/healthz").status, 200)
        starting = world.ask("GET", "/readyz")
        self.assertEqual((starting.status, starting.body), (503, b"starting\n"))
        world.start()
        self.assertEqual(world.ask("GET", "/readyz").status, 200)
        world.lifecycle.stopping()
        self.assertEqual(world.ask("GET", "/readyz").status, 503)

    def test_a_disk_that_refuses_makes_it_unready_until_it_takes_writes_again(self) -> None:
        self.world.broker.stats.storage.refusing = True
        self.assertEqual(self.ask("GET", "/readyz").status, 200)
        self.world.services.data_dir.rename(self.world.services.data_dir.with_suffix(".gone"))
        answer = self.ask("GET", "/readyz")
        self.assertEqual((answer.status, answer.body), (503, b"the disk refuses writes\n"))

    def test_warnings_are_kept_for_the_console(self) -> None:
        Logger().info("not this")
        Logger().warn("disk {name} is slow", name="sda")
        lines = self.ask("GET", "/api/log").json
        self.assertEqual(lines[-1]["text"], "disk sda is slow")
        self.assertEqual(self.ask("GET", f"/api/log?after={lines[-1]['number']}").json, [])

    def test_the_broker_describes_itself(self) -> None:
        self.world.lifecycle.listeners.append(("figg", "tcp 127.0.0.1:7000"))
        document = self.ask("GET", "/api/broker").json
        self.assertEqual(document["listeners"][0]["protocol"], "figg")
        self.assertEqual((document["phase"], document["fsync"]), ("ready", "always"))

    def test_unknown_paths_and_methods_are_errors_in_json(self) -> None:
        self.assertEqual(self.ask("GET", "/api/nothing").status, 404)
        self.assertEqual(self.ask("DELETE", "/api/topics", token=ADMIN).status, 405)

    def test_the_openapi_document_lists_exactly_the_paths_that_are_served(self) -> None:
        document = self.ask("GET", "/openapi.json").json
        described = {
            (method.upper(), path)
            for path, operations in document["paths"].items()
            for method in operations
            if method != "parameters" and path.startswith("/api/")
        }
        api = self.world.site.resource.children[b"api"]
        served = {
            (route.method.decode(), "/api/" + "/".join(route.pattern)) for route in api._routes
        }
        self.assertEqual(described, served)

    def test_static_files_are_complete(self) -> None:
        page = self.ask("GET", "/").body.decode()
        for entry in (resources.files("multibroker.web") / "static").iterdir():
            self.assertEqual(self.ask("GET", f"/static/{entry.name}").status, 200)
        self.assertNotIn("onclick", page)
        self.assertNotIn("<style", page)


class MetricsTests(ApiCase):
    def samples(self) -> dict[tuple[str, str], float]:
        text = self.ask("GET", "/metrics").body.decode()
        return {
            (
                sample.name,
                ",".join(value for _, value in sorted(sample.labels.items())),
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def test_a_known_load_is_counted_exactly(self) -> None:
        self.publish(b"t", b"one", b"two")
        self.publish(b"u", b"three")
        wire = self.world.broker.stats.wires["figg"]
        wire.messages_in, wire.bytes_in = 3, 99
        wire.errors["WireError"] = 2
        wire.publish_us.add(1500)
        found = self.samples()
        self.assertEqual(found["multibroker_topic_published_messages_total", "t"], 2)
        self.assertEqual(found["multibroker_topic_published_messages_total", "u"], 1)
        self.assertEqual(found["multibroker_received_bytes_total", "figg"], 99)
        self.assertEqual(found["multibroker_protocol_errors_total", "WireError,figg"], 2)
        self.assertEqual(found["multibroker_publish_seconds_count", "figg"], 1)
        self.assertAlmostEqual(found["multibroker_publish_seconds_sum", "figg"], 0.0015)
        self.assertEqual(found["multibroker_topics", ""], 2)
        self.assertGreater(found["process_resident_memory_bytes", ""], 0)
        self.assertGreater(found["process_open_fds", ""], 0)

    def test_histogram_buckets_are_cumulative_and_end_at_the_count(self) -> None:
        histogram = self.world.broker.stats.storage.sync_us
        for value in (0, 1, 1000, 10**12):
            histogram.add(value)
        text = self.ask("GET", "/metrics").body.decode()
        (family,) = (
            f for f in text_string_to_metric_families(text) if f.name == "multibroker_sync_seconds"
        )
        buckets = [s for s in family.samples if s.name.endswith("_bucket")]
        values = [sample.value for sample in buckets]
        self.assertEqual(values, sorted(values))
        self.assertEqual((values[0], values[-1]), (1, 4))
        by_bound = {float(sample.labels["le"]): sample.value for sample in buckets}
        self.assertEqual(by_bound[1023e-6], 3)

    def test_topic_labels_are_bounded(self) -> None:
        for number in range(10):
            self.publish(f"t{number}".encode(), *[b"x"] * (10 - number))
        labels = {label for name, label in self.samples() if name.startswith("multibroker_topic_")}
        self.assertEqual(labels, {"t0", "t1", "t2", "_other"})
        total = self.samples()["multibroker_topic_published_messages_total", "_other"]
        self.assertEqual(total, sum(10 - number for number in range(3, 10)))

    def test_json_is_json(self) -> None:
        self.assertIsInstance(json.loads(self.ask("GET", "/api/stats").body), dict)
