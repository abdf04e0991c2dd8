"""The core's counters in Prometheus' text format.

Nothing is counted here: each scrape walks the counters of broker/stats.py. Topic labels are
bounded (`metrics-topics-max`); the busiest topics keep their names, the rest are added up
under `_other`, so that a client that makes up topic names cannot flood the monitoring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from multibroker import __version__
from multibroker.broker.broker import Broker
from multibroker.broker.stats import BUCKETS, Histogram, TopicStats
from multibroker.web.naming import topic_text

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
MICROSECONDS = 1e-6
OTHER = "_other"

_WIRE_COUNTERS = (
    ("connections_total", "multibroker_connections", "Connections accepted."),
    ("refused_total", "multibroker_connections_refused", "Connections refused by the limit."),
    ("bytes_in", "multibroker_received_bytes", "Bytes received."),
    ("bytes_out", "multibroker_sent_bytes", "Bytes sent."),
    ("messages_in", "multibroker_received_messages", "Messages published."),
    ("messages_out", "multibroker_sent_messages", "Messages delivered."),
)
_TOPIC_COUNTERS = (
    ("messages_in", "multibroker_topic_published_messages", "Messages appended."),
    ("bytes_in", "multibroker_topic_published_bytes", "Bundle bytes appended."),
    ("messages_out", "multibroker_topic_delivered_messages", "Messages handed to readers."),
    ("bytes_out", "multibroker_topic_delivered_bytes", "Bytes handed to readers."),
    ("skipped", "multibroker_topic_skipped_messages", "Messages that readers had to skip."),
    ("redelivered", "multibroker_topic_redelivered_messages", "Messages delivered again."),
    ("dead_lettered", "multibroker_topic_dead_letters", "Messages moved to a dead-letter topic."),
)
_STORAGE_COUNTERS = (
    ("appends", "multibroker_storage_appends", "Appends."),
    ("segments_removed", "multibroker_storage_segments_removed", "Segments that retention took."),
    ("bytes_removed", "multibroker_storage_removed_bytes", "Bytes that retention took."),
    ("compactions", "multibroker_storage_compactions", "Key compactions."),
)


class BrokerCollector(Collector):
    """Reads the broker's counters whenever Prometheus asks."""

    def __init__(self, broker: Broker, topics_max: int, sessions: Callable[[], int | None]) -> None:
        self._broker = broker
        self._topics_max = topics_max
        self._sessions = sessions

    def collect(self) -> Iterator[Any]:
        yield InfoMetricFamily("multibroker", "The broker.", value={"version": __version__})
        yield from self._wires()
        yield from self._topics()
        yield from self._consumers()
        yield from self._storage()

    def _wires(self) -> Iterator[Any]:
        wires = sorted(self._broker.stats.wires.items())
        open_now = GaugeMetricFamily(
            "multibroker_open_connections", "Connections open now.", labels=["protocol"]
        )
        errors = CounterMetricFamily(
            "multibroker_protocol_errors",
            "Connections or requests that failed, by kind.",
            labels=["protocol", "kind"],
        )
        publish = HistogramMetricFamily(
            "multibroker_publish_seconds", "From receipt to stored.", labels=["protocol"]
        )
        fetch = HistogramMetricFamily(
            "multibroker_fetch_seconds", "From request to answer.", labels=["protocol"]
        )
        for name, wire in wires:
            open_now.add_metric([name], wire.connections)
            for kind, count in sorted(wire.errors.items()):
                errors.add_metric([name, kind], count)
            _add_histogram(publish, [name], wire.publish_us, MICROSECONDS)
            _add_histogram(fetch, [name], wire.fetch_us, MICROSECONDS)
        yield from (open_now, errors, publish, fetch)
        for attribute, metric, text in _WIRE_COUNTERS:
            family = CounterMetricFamily(metric, text, labels=["protocol"])
            for name, wire in wires:
                family.add_metric([name], getattr(wire, attribute))
            yield family

    def _topics(self) -> Iterator[Any]:
        rows = self._named_topics()
        for attribute, metric, text in _TOPIC_COUNTERS:
            family = CounterMetricFamily(metric, text, labels=["topic"])
            for name, stats in rows:
                family.add_metric([name], getattr(stats, attribute))
            yield family

    def _named_topics(self) -> list[tuple[str, TopicStats]]:
        busiest = sorted(
            self._broker.stats.topics.items(), key=lambda item: item[1].messages_in, reverse=True
        )
        rows = [(topic_text(name), stats) for name, stats in busiest[: self._topics_max]]
        rest = [stats for _, stats in busiest[self._topics_max :]]
        if rest:
            rows.append((OTHER, _sum(rest)))
        return rows

    def _consumers(self) -> Iterator[Any]:
        in_flight = GaugeMetricFamily(
            "multibroker_in_flight_messages", "Delivered, not yet acknowledged.", labels=["topic"]
        )
        lag = GaugeMetricFamily(
            "multibroker_consumer_lag_messages", "Not yet read by a consumer.", labels=["topic"]
        )
        totals: dict[str, list[int]] = {}
        for consumer in self._broker.consumers():
            total = totals.setdefault(topic_text(consumer.topic), [0, 0])
            total[0] += consumer.in_flight
            total[1] = max(total[1], consumer.lag)
        for name, (flying, behind) in sorted(totals.items())[: self._topics_max]:
            in_flight.add_metric([name], flying)
            lag.add_metric([name], behind)
        sessions = GaugeMetricFamily("multibroker_sessions", "Resumable sessions kept.")
        count = self._sessions()
        if count is not None:
            sessions.add_metric([], count)
        yield from (in_flight, lag, sessions)

    def _storage(self) -> Iterator[Any]:
        stats = self._broker.stats.storage
        for attribute, metric, text in _STORAGE_COUNTERS:
            yield CounterMetricFamily(metric, text, value=getattr(stats, attribute))
        errors = CounterMetricFamily(
            "multibroker_storage_errors", "Storage failures by kind.", labels=["kind"]
        )
        for kind, count in sorted(stats.errors.items()):
            errors.add_metric([kind], count)
        sync = HistogramMetricFamily("multibroker_sync_seconds", "Duration of a sync to disk.")
        _add_histogram(sync, [], stats.sync_us, MICROSECONDS)
        batches = HistogramMetricFamily("multibroker_sync_appends", "Appends that share one sync.")
        _add_histogram(batches, [], stats.sync_batches, 1)
        topics = self._broker.topics()
        size = GaugeMetricFamily("multibroker_log_bytes", "Bytes in all segment files.")
        size.add_metric([], sum(part.size_bytes for t in topics for part in t.partitions))
        segments = GaugeMetricFamily("multibroker_log_segments", "Segment files.")
        if stats.count_segments is not None:
            segments.add_metric([], stats.count_segments())
        count_of_topics = GaugeMetricFamily("multibroker_topics", "Topics.", value=len(topics))
        yield from (errors, sync, batches, size, segments, count_of_topics)


def _add_histogram(
    family: HistogramMetricFamily, labels: list[str], histogram: Histogram, unit: float
) -> None:
    buckets, running = [], 0
    for power in range(BUCKETS):
        running += histogram.buckets[power]
        # bucket i holds the integers below 2**i, so the inclusive bound is one less
        buckets.append((repr((2**power - 1) * unit), float(running)))
    buckets.append(("+Inf", float(histogram.count)))
    family.add_metric(labels, buckets, sum_value=histogram.total * unit)


def _sum(rows: Iterable[TopicStats]) -> TopicStats:
    rows = list(rows)
    names = [attribute for attribute, _, _ in _TOPIC_COUNTERS]
    return TopicStats(**{name: sum(map(attrgetter(name), rows)) for name in names})


class Metrics:
    def __init__(self, broker: Broker, topics_max: int, sessions: Callable[[], int | None]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(BrokerCollector(broker, topics_max, sessions))

    def text(self) -> bytes:
        return generate_latest(self._registry)
