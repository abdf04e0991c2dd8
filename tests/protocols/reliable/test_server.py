from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred

from multibroker.protocols.reliable.twister import update_crc
from tests.protocols.reliable.harness import Client, ServerCase


class StatelessTests(ServerCase):
    def test_resume_at_23_gives_46_92_184(self) -> None:
        client = self.connect(reading=False)
        client.say({"state": "23"})
        self.clock.advance(0)
        self.assertTrue(
            client.take().startswith(b'{"data":"46"}\n{"data":"92"}\n{"data":"184"}\n'))

    def test_a_new_stream_doubles_a_first_value_of_1_to_255(self) -> None:
        client = self.connect(reading=False)
        client.say({})
        self.clock.advance(0)
        values = [int(message["data"]) for message in client.messages()[:50]]
        self.assertIn(values[0], range(1, 256))
        self.assertEqual(values, [values[0] * 2**n for n in range(50)])

    def test_a_client_that_does_not_read_is_sent_no_more(self) -> None:
        client = self.connect(reading=False)
        client.say({})
        self.run_on(1000)
        size = len(client.value())
        self.assertLess(size, 200_000)
        client.take()
        client.producer.resumeProducing()
        self.run_on(1000)
        self.assertGreater(len(client.value()), 100_000)

    def test_the_stream_ends_where_its_values_could_not_be_sent_back(self) -> None:
        self.serve(line_bytes_max=4096)
        client = self.ask({"state": "1" + "0" * 4020})
        *values, error = client.messages()
        self.assertIn("too long", error["error"])
        self.assertEqual(client.closed, "closed")
        last = json.dumps({"state": values[-1]["data"]}).encode()
        self.assertLess(len(last), 4096)

    def test_further_messages_are_refused(self) -> None:
        client = self.connect()
        client.say({})
        client.say({"state": "1"})
        self.assertEqual(client.messages(),
                         [{"error": "A stateless stream takes no further messages"}])
        self.assertEqual(client.closed, "closed")

    def test_one_message_per_interval(self) -> None:
        self.serve(interval_ms=1000)
        client = self.ask({"state": "1"})
        self.assertEqual(client.messages(), [{"data": "2"}])
        self.clock.advance(0.999)
        self.assertEqual(client.messages(), [])
        self.clock.advance(0.001)
        self.assertEqual(client.messages(), [{"data": "4"}])
        self.clock.pump([1.0, 1.0])
        self.assertEqual(client.messages(), [{"data": "8"}, {"data": "16"}])


class StatefulTests(ServerCase):
    def test_a_stream_has_its_count_and_a_crc_at_the_end(self) -> None:
        messages = self.begin("u", 5).messages()
        self.assertEqual([m["id"] for m in messages], [1, 2, 3, 4, 5])
        values = [m["data"]["value"] for m in messages]
        self.assertEqual([set(m["data"]) for m in messages], [{"value"}] * 4 + [{"value", "crc"}])
        self.assertEqual(messages[-1]["data"]["crc"], update_crc(0, values))

    def test_lines_are_compact_and_whole(self) -> None:
        data = self.begin("u", 2).take()
        self.assertRegex(
            data, rb'^\{"id":1,"data":\{"value":\d+\}\}\n'
            rb'\{"id":2,"data":\{"value":\d+,"crc":\d+\}\}\n$')

    def test_count_1_is_one_message_with_crc(self) -> None:
        (message,) = self.begin("u", 1).messages()
        self.assertEqual(set(message["data"]), {"value", "crc"})

    def test_the_longest_stream_is_whole(self) -> None:
        client = self.connect()
        client.say({"uuid": "u", "params": {"count": 65535}})
        self.run_on(2000)
        messages = client.messages()
        self.assertEqual([m["id"] for m in messages], list(range(1, 65536)))
        values = [m["data"]["value"] for m in messages]
        self.assertEqual(messages[-1]["data"]["crc"], update_crc(0, values))

    def test_resume_at_3_gives_4_and_5_identical(self) -> None:
        first = self.begin("u", 5).take().splitlines()
        again = self.ask({"uuid": "u", "state": 3}).take().splitlines()
        self.assertEqual(again, first[3:])

    def test_a_stream_cut_anywhere_resumes_to_the_same_end(self) -> None:
        whole = self.connect(reading=False)
        whole.say({"uuid": "u", "params": {"count": 9000}})
        self.run_on()
        part = whole.take().splitlines()
        whole.hang_up()
        self.assertLess(len(part), 9000)
        rest = self.ask({"uuid": "u", "state": len(part)}).take().splitlines()
        messages = [json.loads(line) for line in part + rest]
        self.assertEqual([m["id"] for m in messages], list(range(1, 9001)))
        self.assertEqual(messages[-1]["data"]["crc"],
                         update_crc(0, [m["data"]["value"] for m in messages]))

    def test_after_the_end_the_connection_closes_when_the_linger_is_over(self) -> None:
        client = self.begin("u", 3)
        self.clock.advance(0.9)
        self.assertEqual(client.closed, "")
        self.clock.advance(0.1)
        self.assertEqual(client.closed, "closed")

    def test_a_rewind_during_the_linger_is_honoured(self) -> None:
        client = self.begin("u", 3)
        first = client.take().splitlines()
        self.clock.advance(0.9)
        client.say({"uuid": "u", "state": 1})
        self.run_on()
        self.assertEqual(client.take().splitlines(), first[1:])
        self.clock.advance(0.9)
        self.assertEqual(client.closed, "")
        self.clock.advance(0.1)
        self.assertEqual(client.closed, "closed")

    def test_a_rewind_in_the_middle_goes_on_from_there(self) -> None:
        self.serve(interval_ms=100)
        client = self.begin("u", 6)
        self.clock.pump([0.1] * 3)
        self.run_on()
        before = client.take().splitlines()
        self.assertEqual(len(before), 4)
        client.say({"uuid": "u", "state": 2})
        for _ in range(6):
            self.clock.advance(0.1)
            self.run_on()
        after = client.take().splitlines()
        self.assertEqual(after[:2], before[2:])
        self.assertEqual([json.loads(line)["id"] for line in after], [3, 4, 5, 6])

    def test_resuming_a_finished_session_at_its_last_id_sends_nothing_and_closes(self) -> None:
        self.begin("u", 3).hang_up()
        client = self.ask({"uuid": "u", "state": 3})
        self.clock.advance(1)
        self.assertEqual((client.take(), client.closed), (b"", "closed"))

    def test_state_0_replays_from_1_if_nothing_was_acknowledged(self) -> None:
        first = self.begin("u", 3).take()
        self.assertEqual(self.ask({"uuid": "u", "state": 0}).take(), first)

    def test_params_again_start_afresh_until_something_was_acknowledged(self) -> None:
        client = self.begin("u", 3)
        client.take()
        client.say({"uuid": "u", "params": {"count": 2}})
        self.run_on()
        self.assertEqual([m["id"] for m in client.messages()], [1, 2])
        again = self.begin("u", 4)
        self.assertEqual([m["id"] for m in again.messages()], [1, 2, 3, 4])
        again.say({"uuid": "u", "ack": 1})
        refused = self.begin("u", 4)
        self.assertIn("acknowledged", refused.messages()[0]["error"])

    def test_an_ack_of_what_came_before_a_rewind_does_not_disturb_the_replay(self) -> None:
        client = self.begin("u", 5)
        first = client.take().splitlines()
        client.raw(b'{"uuid":"u","state":2}\n{"uuid":"u","ack":5}\n')
        self.run_on()
        self.assertEqual(client.take().splitlines(), first[2:])

    def test_an_ack_does_not_alter_the_stream(self) -> None:
        self.serve(interval_ms=100)
        client = self.begin("u", 5)
        ids = []
        for _ in range(5):
            ids += [m["id"] for m in client.messages()]
            client.say({"uuid": "u", "ack": ids[-1]})
            self.clock.advance(0.1)
            self.run_on()
        self.assertEqual(ids, [1, 2, 3, 4, 5])
        self.assertEqual(client.messages(), [])

    def test_requests_in_one_read_are_served_in_order(self) -> None:
        client = self.connect()
        client.raw(b'{"uuid":"u","params":{"count":3}}\r\n{"uuid":"u","ack":0}\n'
                   b'{"uuid":"u","state":0}\n')
        self.run_on()
        self.assertEqual([m["id"] for m in client.messages()], [1, 2, 3])

    def test_messages_go_out_one_per_interval_also_when_replayed(self) -> None:
        self.begin("u", 3).hang_up()
        self.factory.interval_ms = 1000
        client = self.ask({"uuid": "u", "state": 0})
        seen = []
        for _ in range(3):
            seen.append([m["id"] for m in client.messages()])
            self.clock.advance(1)
            self.run_on()
        self.assertEqual(seen, [[1], [2], [3]])

    def test_a_short_interval_stores_several_messages_at_once_and_sends_one_by_one(self) -> None:
        self.serve(interval_ms=10)
        client = self.begin("u", 100)
        self.assertEqual([m["id"] for m in client.messages()], [1])
        stored = self.sessions._book.session("u").last_id
        self.assertEqual(stored, 10)
        ids = []
        for _ in range(99):
            self.clock.advance(0.01)
            self.run_on(3)
            (message,) = client.messages()
            ids.append(message["id"])
        self.assertEqual(ids, list(range(2, 101)))

    def test_a_long_pause_is_not_made_up_for(self) -> None:
        self.serve(interval_ms=1000)
        client = self.begin("u", 10)
        client.producer.pauseProducing()
        self.clock.advance(5)
        client.producer.resumeProducing()
        self.run_on()
        self.assertEqual([m["id"] for m in client.messages()], [1, 2])

    def test_messages_are_counted(self) -> None:
        self.begin("u", 30)
        self.assertEqual(self.stats.wires["reliable"].messages_out, 30)


class OwnershipTests(ServerCase):
    settings = {"interval-ms": 1000}

    def test_a_second_connection_takes_the_session_over(self) -> None:
        first = self.begin("u", 5)
        second = self.ask({"uuid": "u", "state": 1})
        self.assertEqual(first.closed, "aborted")
        self.assertEqual([m["id"] for m in second.messages()], [2])

    def test_the_old_connections_end_does_not_start_the_expiry(self) -> None:
        self.begin("u", 1000)
        second = self.ask({"uuid": "u", "state": 1})
        for _ in range(200):
            self.clock.advance(1)
            self.run_on(3)
        self.assertEqual(second.closed, "")
        self.assertEqual(second.messages()[-1]["id"], 202)

    def test_a_session_expires_after_the_last_connection_is_gone(self) -> None:
        self.begin("u", 5).hang_up()
        self.clock.advance(179)
        self.ask({"uuid": "u", "state": 1}).hang_up()
        self.clock.advance(179)
        client = self.ask({"uuid": "u", "state": 1})
        self.assertEqual([m["id"] for m in client.messages()], [2])
        client.hang_up()
        self.clock.advance(180)
        self.assertEqual(self.ask({"uuid": "u", "state": 1}).messages(),
                         [{"error": "Unknown client 'u'"}])
        self.assertEqual(len(self.sessions), 0)

    def test_a_refused_takeover_leaves_the_owner_alone(self) -> None:
        first = self.begin("u", 5)
        self.assertEqual(self.ask({"uuid": "u", "state": 4}).messages(),
                         [{"error": "Unknown message ID '4'"}])
        self.assertEqual(first.closed, "")

    def test_what_was_stored_ahead_but_never_sent_cannot_be_claimed(self) -> None:
        first = self.begin("u", 5)
        self.assertEqual([m["id"] for m in first.messages()], [1])
        first.hang_up()
        self.assertEqual(self.ask({"uuid": "u", "state": 2}).messages(),
                         [{"error": "Unknown message ID '2'"}])
        self.assertEqual([m["id"] for m in self.ask({"uuid": "u", "state": 1}).messages()], [2])


class SlowSessions:
    """Sessions whose answers to register and ack the test holds back."""

    def __init__(self, sessions: Any) -> None:
        self._sessions = sessions
        self.held: list[Deferred[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sessions, name)

    def __len__(self) -> int:
        return len(self._sessions)

    def register(self, uuid: str, state: Any) -> Deferred[None]:
        return self._later(self._sessions.register(uuid, state))

    def ack(self, uuid: str, id: int) -> Deferred[None]:
        return self._later(self._sessions.ack(uuid, id))

    def _later(self, answer: Deferred[None]) -> Deferred[None]:
        held: Deferred[None] = Deferred()
        held.addCallback(lambda _: answer)
        self.held.append(held)
        return held

    def answer(self) -> None:
        held, self.held = self.held, []
        for deferred in held:
            deferred.callback(None)


class SlowAnswerTests(ServerCase):
    """What happens while the sessions still store a request."""

    def make_sessions(self, settings: dict[str, Any]) -> Any:
        return SlowSessions(super().make_sessions(settings))

    def begun(self, uuid: str, count: int) -> Client:
        client = self.begin(uuid, count)
        self.sessions.answer()
        self.run_on()
        return client

    def test_a_client_that_leaves_during_its_begin_leaves_no_session_for_ever(self) -> None:
        self.begin("u", 5).hang_up()
        self.sessions.answer()
        self.clock.advance(180)
        self.assertEqual(len(self.sessions), 0)

    def test_a_client_that_leaves_during_its_resume_leaves_no_session_for_ever(self) -> None:
        self.begun("u", 5).hang_up()
        self.ask({"uuid": "u", "state": 1}).hang_up()
        self.sessions.answer()
        self.clock.advance(180)
        self.assertEqual(len(self.sessions), 0)

    def test_a_new_life_of_a_session_never_reaches_its_old_connection(self) -> None:
        self.factory.interval_ms = 100
        old = self.begun("u", 50)
        self.clock.advance(0.1)
        self.run_on()
        self.assertEqual([m["id"] for m in old.messages()], [1, 2])
        new = self.begin("u", 50)
        for _ in range(5):
            self.clock.advance(0.1)
            self.run_on()
        self.assertEqual(old.messages(), [])
        self.sessions.answer()
        self.run_on()
        self.assertEqual([m["id"] for m in new.messages()], [1])
        self.assertEqual(old.closed, "aborted")

    def test_a_client_that_leaves_while_it_takes_over_ends_the_old_connection_too(self) -> None:
        old = self.begun("u", 5)
        self.begin("u", 5).hang_up()
        self.assertEqual(old.closed, "aborted")
        self.sessions.answer()
        self.clock.advance(180)
        self.assertEqual(len(self.sessions), 0)

    def test_requests_behind_a_slow_one_wait_for_it_unread(self) -> None:
        client = self.begin("u", 5)
        client.say({"uuid": "u", "ack": 0})
        self.assertEqual(client.producerState, "paused")
        self.sessions.answer()
        self.assertEqual(client.producerState, "producing")
        self.run_on()
        self.assertEqual(len(client.messages()), 5)


class LimitTests(ServerCase):
    def test_a_client_that_does_not_read_stops_the_generation(self) -> None:
        clients = [self.connect(reading=False) for _ in range(50)]
        for number, client in enumerate(clients):
            client.say({"uuid": str(number), "params": {"count": 65535}})
        self.run_on(2000)
        self.assertLess(max(len(client.value()) for client in clients), 400_000)
        held = sum(session.last_id for session in self.sessions._book.sessions.values())
        self.assertLess(held, 50 * 10_000)

    def test_every_end_of_a_stream_gives_its_share_back(self) -> None:
        self.begin("ended", 3)
        self.clock.advance(1)
        self.begin("gone", 3).hang_up()
        self.begin("taken", 3)
        self.ask({"uuid": "taken", "state": 1}).hang_up()
        self.begin("failed", 3).say("oops")
        self.assertEqual(self.factory.ahead.streams, 0)

    def test_unread_clients_do_not_hold_up_the_others(self) -> None:
        stuck = self.connect(reading=False)
        stuck.say({"uuid": "stuck", "params": {"count": 65535}})
        self.run_on()
        self.assertEqual(len(self.begin("quick", 5000).messages()), 5000)

    def test_a_long_line_is_refused_before_it_is_whole(self) -> None:
        self.serve(line_bytes_max=5000)
        client = self.connect()
        client.raw(b"x" * 5001)
        self.assertEqual(client.messages(), [{"error": "Message is longer than 5000 bytes"}])
        self.assertEqual(client.closed, "closed")

    def test_sessions_are_limited(self) -> None:
        self.serve(sessions_max=2)
        self.begin("a", 1)
        self.begin("b", 1)
        self.assertEqual(self.begin("c", 1).messages(),
                         [{"error": "Too many sessions; try again later"}])

    def test_connections_are_limited(self) -> None:
        self.serve(connections_max=2)
        self.connect()
        self.connect()
        self.assertEqual(self.connect().closed, "aborted")

    def test_a_silent_connection_is_closed(self) -> None:
        client = self.connect()
        client.raw(b'{"unfinished')
        self.clock.advance(30)
        self.assertEqual(client.closed, "aborted")

    def test_a_client_at_the_unacknowledged_limit_goes_on_after_an_ack(self) -> None:
        self.serve(unacknowledged_max=10)
        client = self.begin("u", 25)
        self.assertEqual([m["id"] for m in client.messages()], list(range(1, 11)))
        client.say({"uuid": "u", "ack": 6})
        self.run_on()
        self.assertEqual([m["id"] for m in client.messages()], list(range(11, 17)))
        client.say({"uuid": "u", "ack": 16})
        self.run_on()
        self.clock.advance(29)
        client.say({"uuid": "u", "ack": 20})
        self.run_on()
        self.assertEqual([m["id"] for m in client.messages()], list(range(17, 26)))

    def test_a_client_that_never_acknowledges_is_refused_at_the_limit(self) -> None:
        self.serve(unacknowledged_max=10)
        client = self.begin("u", 25)
        client.take()
        self.clock.advance(30)
        self.assertEqual(client.messages(), [{"error": "Too many unacknowledged messages"}])
        self.assertEqual(client.closed, "closed")

    def test_a_client_that_does_not_even_read_its_error_is_cut_off(self) -> None:
        client = self.connect()
        client.loseConnection = lambda: None  # type: ignore[method-assign]
        client.say([])
        self.clock.advance(9)
        self.assertEqual(client.closed, "")
        self.clock.advance(1)
        self.assertEqual(client.closed, "aborted")

    def test_a_stop_of_the_service_ends_with_whole_lines(self) -> None:
        client = self.connect(reading=False)
        client.say({"uuid": "u", "params": {"count": 65535}})
        self.run_on()
        stopped = self.factory.stopServing()
        self.run_on()
        self.successResultOf(stopped)
        self.assertEqual(client.closed, "closed")
        self.assertTrue(client.take().endswith(b"}\n"))


BEGUN = {"uuid": "known", "params": {"count": 5}}
COUNT_TEXT = "'params.count' must be an integer from 1 to 65535"
UUID_TEXT = "'uuid' must be a non-empty string"
DIGITS_TEXT = "'state' without 'uuid' must be a string of decimal digits"

# What was said before, what is said, the error text. Strings and bytes are sent as they are.
REFUSALS: list[tuple[list[Any], Any, str]] = [
    # The original's texts.
    ([], {"uuid": "nobody", "state": 3}, "Unknown client 'nobody'"),
    ([BEGUN], {"uuid": "nobody", "ack": 3}, "Unknown client 'nobody'"),
    ([], {"uuid": "known", "ack": 0}, "Cannot send ACK as the first message"),
    ([], {"ack": 0}, "Cannot send ACK as the first message"),
    ([], {"uuid": "u", "ack": 1, "params": {"count": 1}}, "Cannot send ACK as the first message"),
    ([BEGUN], {"uuid": "known", "ack": 6}, "Unknown message ID '6'"),
    ([BEGUN], {"uuid": "known", "state": 6}, "Unknown message ID '6'"),
    ([BEGUN], {"uuid": "known", "ack": 2**40}, f"Unknown message ID '{2**40}'"),
    ([BEGUN, {"uuid": "known", "ack": 3}], {"uuid": "known", "ack": 2}, "Out-of-order ACK"),
    ([BEGUN, {"uuid": "known", "ack": 3}], {"uuid": "known", "state": 2}, "Out-of-order ACK"),
    ([BEGUN, {"uuid": "known", "state": 3}], {"uuid": "known", "ack": 2}, "Out-of-order ACK"),
    ([BEGUN], {"uuid": "known", "ack": -1}, "Out-of-order ACK"),
    ([BEGUN], {"uuid": "known", "state": -1}, "Out-of-order ACK"),
    # No message at all.
    ([], "", "Message is not JSON"),
    ([], "hello", "Message is not JSON"),
    ([], '{"uuid":', "Message is not JSON"),
    ([], b'{"uuid":"\xff","params":{"count":1}}', "Message is not JSON"),
    ([], "[" * 100_000, "Message is not JSON"),
    ([], '{"state":' + "9" * 5000 + "}", "Message is not JSON"),
    ([], [], "Message is not a JSON object"),
    ([], None, "Message is not a JSON object"),
    ([], 42, "Message is not a JSON object"),
    ([], '"{}"', "Message is not a JSON object"),
    ([BEGUN], "garbage", "Message is not JSON"),
    # Counts.
    *[([], {"uuid": "u", "params": {"count": count}}, COUNT_TEXT)
      for count in (0, -1, 65536, 2**64, 1.5, 5.0, "5", None, True, [], {})],
    ([], {"uuid": "u", "params": {}}, COUNT_TEXT),
    ([], {"uuid": "u", "params": None}, COUNT_TEXT),
    ([], {"uuid": "u", "params": [5]}, COUNT_TEXT),
    # Uuids.
    *[([], {"uuid": uuid, "params": {"count": 5}}, UUID_TEXT)
      for uuid in ("", None, 42, True, ["u"], {})],
    ([], {"params": {"count": 5}}, UUID_TEXT),
    ([], {"uuid": None}, UUID_TEXT),
    ([], {"uuid": "", "state": 1}, UUID_TEXT),
    ([BEGUN], {"uuid": 1, "ack": 1}, UUID_TEXT),
    ([], '{"uuid":"\\ud800","params":{"count":1}}', "'uuid' must be Unicode text"),
    ([], {"uuid": "u" * 257, "params": {"count": 5}}, "'uuid' must not be longer than 256 bytes"),
    ([], {"uuid": "ü" * 129, "state": 5}, "'uuid' must not be longer than 256 bytes"),
    ([], {"uuid": "u"}, "A message with 'uuid' needs 'params', 'state' or 'ack'"),
    ([], {"uuid": "u", "params": {"count": 1}, "state": 0},
     "'params' and 'state' exclude each other"),
    # Ids.
    *[([BEGUN], {"uuid": "known", "state": id}, "'state' must be an integer")
      for id in ("1", 1.0, 1.5, None, True, [], {})],
    *[([BEGUN], {"uuid": "known", "ack": id}, "'ack' must be an integer")
      for id in ("1", 1.0, 1.5, None, True, [], {})],
    # Other uuids on a connection that has one.
    ([BEGUN], {"uuid": "v", "params": {"count": 1}},
     "This connection has the stream of client 'known'"),
    ([BEGUN], {"uuid": "v", "state": 0}, "This connection has the stream of client 'known'"),
    ([BEGUN], {}, "This connection has a stateful stream"),
    ([BEGUN, {"uuid": "known", "ack": 5}], BEGUN,
     "Client 'known' has acknowledged messages and cannot start again"),
    # Stateless resumption.
    *[([], {"state": value}, DIGITS_TEXT)
      for value in ("", "-5", "+5", "1.5", "1e5", " 5", "5 ", "0x10", "٣", 23, None, True, [], {})],
]


def as_line(message: Any) -> bytes:
    if isinstance(message, bytes):
        return message + b"\n"
    return (message if isinstance(message, str) else json.dumps(message)).encode() + b"\n"


class ValidationTests(ServerCase):
    def refused(self, client: Client, text: str, what: str) -> None:
        self.assertEqual(client.messages(), [{"error": text}], what)
        self.assertEqual(client.closed, "closed", what)

    def test_every_bad_message_gets_its_error_and_then_the_close(self) -> None:
        for before, message, text in REFUSALS:
            self.serve()
            client = self.ask(*before)
            client.take()
            client.raw(as_line(message))
            self.run_on(20)
            self.refused(client, text, f"{str(message)[:80]!r}")

    def test_an_ack_for_a_client_on_another_connection_is_refused(self) -> None:
        self.begin("other", 5)
        client = self.begin("mine", 5)
        client.take()
        client.say({"uuid": "other", "ack": 1})
        self.refused(client, "Client 'other' has another connection", "ack")

    def test_a_bad_message_hurts_no_other_connection(self) -> None:
        self.factory.interval_ms = 1000
        good = self.begin("good", 3)
        for _, message, _ in REFUSALS:
            self.connect().raw(as_line(message))
        ids = []
        for _ in range(3):
            ids += [m["id"] for m in good.messages()]
            self.clock.advance(1)
            self.run_on()
        self.assertEqual(ids, [1, 2, 3])

    def test_nothing_after_a_refusal_is_heard(self) -> None:
        client = self.connect()
        client.raw(b'oops\n{"uuid":"u","params":{"count":1}}\n')
        client.raw(b'{"uuid":"u","params":{"count":1}}\n')
        self.run_on()
        self.assertEqual(client.messages(), [{"error": "Message is not JSON"}])
        self.assertEqual(len(self.sessions), 0)

    def test_legal_but_unusual_messages_are_accepted(self) -> None:
        for uuid in ("42", "ü", " ", "a'b\"c\n", "x" * 256):
            self.assertEqual(len(self.begin(uuid, 2).messages()), 2, uuid)
        client = self.begin("u", 3)
        for id in (0, 2, 2, 3, 3):
            client.say({"uuid": "u", "ack": id})
        client.take()
        client.say({"ack": 3})
        client.say({"uuid": "u", "state": 3})
        self.run_on()
        self.assertEqual(client.messages(), [])
