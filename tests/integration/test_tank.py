"""TANK over real sockets, on a real disk, in a real process that is killed and started again."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.protocols.tank import answers
from multibroker.protocols.tank.codec import encode_request
from multibroker.protocols.tank.messages import (
    Consume,
    Consumed,
    CreateTopic,
    FetchedPartition,
    FetchPartition,
    FetchTopic,
    Produce,
    ProducePartition,
    ProduceTopic,
    Request,
    Response,
)
from multibroker.records import Bundle, Records
from tests.integration.process import BrokerProcess, environment
from tests.protocols.tank.test_transcripts import lines

HOST = "127.0.0.1"
ANSWER_SECS = 20.0
QUIET_SECS = 0.1
TIME_MS = 1_700_000_000_000


class Peer:
    """A blocking connection that reads whole frames."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), ANSWER_SECS)
        self._unread = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def frame(self) -> bytes:
        """The next frame, or b"" if the server closed."""
        head = self._take(5)
        return head + self._take(int.from_bytes(head[1:], "little")) if head else b""

    def _take(self, size: int) -> bytes:
        taken = bytearray(self._unread[:size])
        self._unread = self._unread[size:]
        while len(taken) < size:
            data = self.socket.recv(min(size - len(taken), 1 << 20))
            if not data:
                return b""
            taken += data
        return bytes(taken)

    def quiet(self) -> bool:
        self.socket.settimeout(QUIET_SECS)
        with contextlib.suppress(TimeoutError):
            self._unread += self.socket.recv(1 << 16)
        self.socket.settimeout(ANSWER_SECS)
        return not self._unread

    def ask(self, request: Request) -> Response:
        self.send(encode_request(request))
        while (frame := self.frame())[0] == 3:
            pass
        return answers.decode(frame[0], frame, 5, len(frame))

    def publish(self, made: Bundle, topic: bytes = b"t") -> bytes:
        answer = self.ask(Produce(1, [ProduceTopic(topic, [ProducePartition(0, made)])]))
        return bytes(getattr(answer, "codes"))

    def fetch(self, seq: int, topic: bytes = b"t", wait_ms: int = 0) -> FetchedPartition:
        places = [FetchTopic(topic, [FetchPartition(0, seq, 1 << 20)])]
        answer = self.ask(Consume(1, places, wait_ms))
        assert isinstance(answer, Consumed) and answer.topics[0].partitions
        return answer.topics[0].partitions[0]

    def read_all(self, topic: bytes = b"t") -> tuple[list[int], list[bytes], bytes]:
        """Every sequence number and payload of partition 0, and the bytes they came in."""
        seqs: list[int] = []
        payloads: list[bytes] = []
        data, seq = b"", 0
        while True:
            found = self.fetch(seq, topic)
            if not found.data:
                return seqs, payloads, data
            records: Records = bundle.decode_chunk(found.data, found.base_seq)
            seqs += records.seqs
            payloads += records.payloads
            data += found.data
            seq = seqs[-1] + 1


class TankProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tank-", dir=os.getcwd()))
        self.broker = BrokerProcess(self.directory, f"--tank=tcp:0:interface={HOST}")
        self.addCleanup(self.broker.kill)

    def start(self, *more: str) -> Peer:
        self.broker.start(*more)
        return self.connect()

    def connect(self) -> Peer:
        peer = Peer(self.broker.ports["tank"])
        self.addCleanup(peer.socket.close)
        return peer

    def replay(self, name: str) -> None:
        peers: dict[str, Peer] = {}
        asked: Peer | None = None  # whose request is not answered yet
        for title, line in lines(name):
            if line.startswith("config "):
                _, place, text = line.split(" ", 2)
                path = self.broker.data_dir / "topics" / place
                path.mkdir(exist_ok=True)
                (path / "config").write_text(text)
                continue
            who, event, data = line[0], line[1], line[2:].strip()
            if who not in peers:
                peers[who] = self.connect()
            if event == ">":
                if asked is not None and asked is not peers[who]:
                    asked.quiet()  # the server has heard the one before another speaks
                peers[who].send(bytes.fromhex(data))
                asked = peers[who]
            elif event == "<":
                got = peers[who].frame().hex()
                asked = None
                if data.startswith("0a1e"):  # a status report: when it started is its own affair
                    data, got = data[:54], got[:54]
                self.assertEqual(data, got, title)
            elif event == ".":
                self.assertTrue(peers[who].quiet(), title)
            else:
                self.assertEqual(b"", peers[who].frame(), title)
                del peers[who]

    def test_the_transcripts_on_a_real_disk_and_after_a_kill(self) -> None:
        peer = self.start()
        peer.frame()
        peer.ask(CreateTopic(1, b"foo", 2))
        for name in ("1_basics", "2_waiting", "3_publishing"):
            self.replay(name)
        peer.publish(bundle.encode([b"cli"] * 11, TIME_MS), b"t1")
        for index in range(60):
            payload = b"%05d" % index + b"x" * 500
            peer.publish(bundle.encode([payload], TIME_MS), b"cfg1")
        self.replay("4_retention")
        self.broker.kill()
        self.broker.start()
        self.replay("5_restart")
        self.broker.kill()
        self.broker.start("--tank-read-only")
        self.replay("6_read_only")

    def test_a_fetch_is_the_segment_file_byte_for_byte(self) -> None:
        peer = self.start()
        peer.ask(CreateTopic(1, b"t", 1))
        for made in (
            bundle.encode([b"plain"], TIME_MS),
            bundle.encode([b"k"] * 40, 0, keys=[b"key"] * 40, timestamps_ms=range(40)),
            bundle.encode([b"x" * 3000] * 3, TIME_MS, compress=True),
            bundle.encode([b"s1", b"s2", b"s3"], TIME_MS, seqs=[100, 200, 201]),
            bundle.encode([b"after"], TIME_MS),
        ):
            self.assertEqual(b"\0", peer.publish(made))
        seqs, _, data = peer.read_all()
        self.assertEqual([100, 200, 201, 202], seqs[-4:])
        (segment,) = (self.broker.data_dir / "topics" / "t" / "0").glob("*.log")
        self.assertEqual(segment.read_bytes(), data)

    def test_gaps_keep_their_numbers_over_a_kill(self) -> None:
        peer = self.start()
        peer.ask(CreateTopic(1, b"t", 1))
        peer.publish(bundle.encode([b"a", b"b"], TIME_MS, seqs=[10, 20]))
        place = ProducePartition(0, bundle.encode([b"c", b"d"], TIME_MS), base_seq=50)
        peer.ask(Produce(1, [ProduceTopic(b"t", [place])], with_seqnum=True))
        peer.publish(bundle.encode([b"e"], TIME_MS))
        self.broker.kill()
        self.broker.start()
        peer = self.connect()
        seqs, payloads, _ = peer.read_all()
        self.assertEqual([10, 20, 50, 51, 52], seqs)
        self.assertEqual([b"a", b"b", b"c", b"d", b"e"], payloads)
        self.assertEqual(b"\x0a", peer.publish(bundle.encode([b"x"], TIME_MS, seqs=[52])))

    def test_a_waiting_fetch_is_woken_by_another_connection(self) -> None:
        peer, other = self.start(), self.connect()
        peer.ask(CreateTopic(1, b"t", 1))
        places = [FetchTopic(b"t", [FetchPartition(0, 1, 1 << 20)])]
        peer.send(encode_request(Consume(7, places, 15_000)))
        self.assertTrue(peer.quiet())
        made = bundle.encode([b"wake"], TIME_MS)
        self.assertEqual(b"\0", other.publish(made))
        self.assertTrue(peer.frame().endswith(made.framed))

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.broker.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def test_a_client_that_asks_for_everything_and_reads_nothing_costs_one_answer(self) -> None:
        peer = self.start("--fsync=never")
        peer.ask(CreateTopic(1, b"t", 1))
        made = bundle.encode([os.urandom(1000)] * 1000, TIME_MS)
        for _ in range(20):
            peer.publish(made)
        peer.fetch(1)
        before = self.resident_bytes()
        places = [FetchTopic(b"t", [FetchPartition(0, 1, 8 << 20)])]
        fetches = 40
        greedy = self.connect()
        greedy.frame()
        greedy.send(b"".join(encode_request(Consume(i, places)) for i in range(fetches)))
        for _ in range(20):  # it has had all the time to answer, and serves others meanwhile
            peer.fetch(1)
        self.assertLess(self.resident_bytes() - before, 64 << 20)
        for number in range(fetches):
            frame = greedy.frame()
            self.assertEqual(number, int.from_bytes(frame[9:13], "little"))
            self.assertGreater(len(frame), 7 << 20)

    def publish_keys(self, peer: Peer, newest: dict[bytes, tuple[int, bytes]], start: int) -> int:
        """200 messages of 20 keys from sequence number `start` on; all are acknowledged."""
        for seq in range(start, start + 200, 10):
            numbers = range(seq, seq + 10)
            keys = [b"key %d" % (n * 7 % 20) for n in numbers]
            payloads = [b"value %d" % n + b"." * 50 for n in numbers]
            self.assertEqual(b"\0", peer.publish(bundle.encode(payloads, TIME_MS, keys=keys)))
            newest.update(zip(keys, zip(numbers, payloads)))
        return start + 200

    def test_compaction_keeps_the_newest_of_each_key_over_kills(self) -> None:
        peer = self.start("--fsync=never")
        config = b"log.cleanup.policy=cleanup\nlog.segment.bytes=4kb\n"
        config += b"log.cleaner.min.cleanable.ratio=0\n"
        peer.ask(CreateTopic(1, b"t", 1, config))
        newest: dict[bytes, tuple[int, bytes]] = {}
        start, compacted = 1, False
        for kill in range(4):
            for _ in range(5):
                start = self.publish_keys(peer, newest, start)
            self.broker.kill()
            self.broker.start("--fsync=never")
            peer = self.connect()
            seqs, payloads, _ = peer.read_all()
            found = dict(zip(seqs, payloads))
            self.assertEqual(start - 1, seqs[-1])
            for seq, payload in newest.values():
                self.assertEqual(payload, found[seq])
            compacted = compacted or len(seqs) < start - 1
            # A number that compaction took: the next message there is.
            missing = next((seq for seq in range(1, start) if seq not in found), None)
            if missing is not None and missing > seqs[0]:
                chunk = peer.fetch(missing)
                after = bundle.decode_chunk(chunk.data, chunk.base_seq).seqs
                following = min(seq for seq in seqs if seq > missing)
                self.assertIn(following, after)
        self.assertTrue(compacted)

    def command(self, *words: str, given: bytes = b"") -> bytes:
        endpoint = f"tcp:{HOST}:{self.broker.ports['tank']}"
        done = subprocess.run(
            [sys.executable, "-c", "from multibroker.cli.main import console; console()",
             "tank", words[0], "--connect", endpoint, *words[1:]],
            input=given, capture_output=True, env=environment(), timeout=60,
        )
        self.assertEqual((0, b""), (done.returncode, done.stderr))
        return done.stdout

    def test_following_goes_on_when_the_broker_is_killed_and_comes_back(self) -> None:
        with socket.create_server((HOST, 0)) as probe:
            port = probe.getsockname()[1]
        self.broker.options = (f"--tank=tcp:{port}:interface={HOST}",)
        peer = self.start()
        peer.ask(CreateTopic(1, b"t", 1))
        following = subprocess.Popen(
            [sys.executable, "-c", "from multibroker.cli.main import console; console()",
             "tank", "get", "--connect", f"tcp:{HOST}:{port}", "t"],
            stdout=subprocess.PIPE, env=environment(),
        )
        self.addCleanup(following.wait)
        self.addCleanup(following.kill)
        assert following.stdout is not None
        self.addCleanup(following.stdout.close)
        peer.publish(bundle.encode([b"before"], TIME_MS))
        self.assertEqual(b"before\n", following.stdout.readline())
        self.broker.kill()
        self.broker.start()
        peer = self.connect()
        peer.publish(bundle.encode([b"after"], TIME_MS))
        self.assertEqual(b"after\n", following.stdout.readline())

    def test_no_broker_is_one_line(self) -> None:
        with socket.create_server((HOST, 0)) as probe:
            port = probe.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", "from multibroker.cli.main import console; console()",
             "tank", "status", "--connect", f"tcp:{HOST}:{port}"],
            capture_output=True, env=environment(), timeout=60,
        )
        self.assertEqual(1, done.returncode)
        self.assertEqual(1, len(done.stderr.splitlines()))
        self.assertIn(b"no broker answers", done.stderr)

    def test_the_command_line(self) -> None:
        self.start()
        self.command("create", "t", "-o", "log.segment.bytes=1mb")
        text = b"".join(b"line %d\n" % i for i in range(30_000))
        self.assertEqual(b"30000 messages stored\n", self.command("publish", "t", given=text))
        self.assertEqual(text, self.command("get", "t", "0", "--drain"))
        self.assertEqual(b"0\t1..30000\n", self.command("partitions", "t"))
