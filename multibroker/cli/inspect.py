"""Look into a data directory: topics, partitions, segments, messages.

Without a topic, all topics are listed; with one, its settings, partitions and segments; with
--messages, what is in it. Nothing is changed, and a broker may be running on it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from multibroker.cli.output import human_bytes, print_json, table
from multibroker.records import Chunk
from multibroker.storage.reader import DataReader, PartitionReader, SegmentReader, TopicReader

EXAMPLES = """examples:
  multibroker inspect multibroker-data
  multibroker inspect multibroker-data orders
  multibroker inspect multibroker-data orders --partition 0 --messages --from 1000 --limit 20
  multibroker inspect multibroker-data orders --segment 1 --messages --json
"""

PREVIEW_CHARACTERS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", type=Path, metavar="DATA_DIR")
    parser.add_argument("topic", nargs="?", metavar="TOPIC")
    parser.add_argument("--partition", type=int, metavar="N", help="only this partition")
    parser.add_argument("--segment", type=int, metavar="BASE", help="only the segment of this base")
    parser.add_argument("--messages", action="store_true", help="show messages")
    parser.add_argument("--from", type=int, default=0, dest="start", metavar="SEQ",
                        help="messages from this sequence number on")
    parser.add_argument("--limit", type=int, default=50, metavar="N",
                        help="at most so many messages (default: %(default)s; 0: all)")
    parser.add_argument("--json", action="store_true",
                        help="print JSON (messages: one line each, bytes as latin-1 text)")


def run(args: argparse.Namespace) -> int:
    reader = DataReader(args.data_dir)
    if args.topic is None:
        return _topics(reader, args.json)
    topic = reader.topic(os.fsencode(args.topic))
    numbers = range(topic.partitions) if args.partition is None else [args.partition]
    partitions = [topic.partition(number) for number in numbers]
    if args.messages:
        return _messages(partitions, args)
    return _topic(topic, partitions, args)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _topics(reader: DataReader, as_json: bool) -> int:
    rows = []
    for topic in reader.topics():
        for number in range(topic.partitions):
            partition = topic.partition(number)
            first, next_seq = partition.range()
            segments = partition.segments()
            size = sum(_size(segment) for segment in segments)
            rows.append((_text(topic.name), number, first, next_seq - 1, len(segments), size))
    headings = ("topic", "partition", "first", "last", "segments", "bytes")
    if as_json:
        print_json([dict(zip(headings, row)) for row in rows])
    else:
        shown = [(*row[:-1], human_bytes(row[-1])) for row in rows]
        print(table(headings, shown, right=(1, 2, 3, 4, 5)))
    return 0


def _size(segment: SegmentReader) -> int:
    try:
        return segment.size_bytes
    except FileNotFoundError:
        return 0


def _topic(
    topic: TopicReader, partitions: list[PartitionReader], args: argparse.Namespace
) -> int:
    rows = [row for part in partitions for row in _segments(part, args.segment)]
    if args.json:
        print_json({"topic": _text(topic.name), "id": topic.id, "config": topic.config.pairs(),
                    "partitions": topic.partitions, "segments": rows})
        return 0
    print(f"{_text(topic.name)}: {topic.partitions} partitions, id {topic.id}")
    for key, value in topic.config.pairs().items():
        print(f"  {key}={value}")
    print()
    headings = ("partition", "base", "first", "last", "messages", "bytes", "index", "headers",
                "oldest", "newest", "file")
    print(table(headings, [_cells(row) for row in rows], right=range(8)))
    return 0


def _segments(partition: PartitionReader, base: int | None) -> Iterator[dict[str, Any]]:
    for segment in partition.segments():
        if base is not None and segment.base != base:
            continue
        try:
            entries = segment.entries()
        except FileNotFoundError:
            continue
        yield {
            "partition": partition.number,
            "base": segment.base,
            "first": entries[0].first if entries else segment.base,
            "last": entries[-1].last if entries else segment.base - 1,
            "messages": sum(entry.messages for entry in entries),
            "bytes": segment.size_bytes,
            "entries": len(entries),
            "headers_bytes": sum(entry.headers_length for entry in entries),
            "oldest_ms": min((entry.newest_ms for entry in entries), default=None),
            "newest_ms": max((entry.newest_ms for entry in entries), default=None),
            "path": segment.log_path,
        }


def _cells(row: dict[str, Any]) -> list[Any]:
    return [
        row["partition"], row["base"], row["first"], row["last"], row["messages"],
        human_bytes(row["bytes"]), row["entries"], human_bytes(row["headers_bytes"]),
        _time(row["oldest_ms"]), _time(row["newest_ms"]), os.path.basename(row["path"]),
    ]


def _time(timestamp_ms: int | None) -> str:
    if timestamp_ms is None:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _messages(partitions: list[PartitionReader], args: argparse.Namespace) -> int:
    left = args.limit or -1
    for partition in partitions:
        for chunk in _chunks(partition, args):
            for row in _rows(chunk, args.start):
                if not left:
                    return 0
                left -= 1
                print(json.dumps(row, ensure_ascii=False) if args.json else _line(row))
    return 0


def _chunks(partition: PartitionReader, args: argparse.Namespace) -> Iterator[Chunk]:
    """Of the partition from the start asked for, or of one of its segments."""
    first, last = max(args.start, 1), None
    if args.segment is not None:
        found = [s for s in partition.segments() if s.base == args.segment]
        if not found:
            return
        first = max(first, found[0].base)
        last = found[0].after - 1 if found[0].after else None
    yield from partition.chunks(first, last)


def _rows(chunk: Chunk, start: int) -> Iterator[dict[str, Any]]:
    records = chunk.records
    for n, seq in enumerate(records.seqs):
        if seq < start:
            continue
        key = records.keys[n] if records.keys is not None else None
        yield {
            "partition": chunk.partition,
            "seq": seq,
            "timestamp_ms": records.timestamps_ms[n],
            "key": None if key is None else key.decode("latin-1"),
            "headers": [
                [name.decode("latin-1"), value.decode("latin-1")]
                for name, value in (records.headers[n] if records.headers is not None else ())
            ],
            "payload": records.payloads[n].decode("latin-1"),
        }


def _line(row: dict[str, Any]) -> str:
    payload = row["payload"].encode("latin-1")
    preview = repr(payload[:PREVIEW_CHARACTERS])[2:-1]
    more = "..." if len(payload) > PREVIEW_CHARACTERS else ""
    key = "" if row["key"] is None else f"  key {row['key']!r}"
    headers = "".join(f"  {name}: {value!r}" for name, value in row["headers"])
    return (
        f"{row['partition']}/{row['seq']}  {_time(row['timestamp_ms'])}{key}{headers}"
        f"  {len(payload)} B  {preview}{more}"
    )
