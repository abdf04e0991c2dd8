"""What every implementation of ISessions does. Mixed into one TestCase per implementation."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from multibroker.sessions import Bounds, ISessions, Lines, Message
from multibroker.sessions.errors import (
    NotJson,
    OutOfOrderAck,
    SessionInUse,
    TooLarge,
    TooManySessions,
    TooManyUnacknowledged,
    UnknownMessage,
    UnknownSession,
)

EXPIRY_SECONDS = 180.0
BOUNDS = Bounds(
    sessions_max=20, unacknowledged_max=500, uuid_bytes_max=100, state_bytes_max=10_000,
    put_bytes_max=50_000)


def count_up(state: Any) -> tuple[Any, Any]:
    return {"n": state + 1}, state + 1


def count_up_to_ten(state: Any, count: int) -> tuple[list[str], Any]:
    end = min(state + count, 10)
    return [f'{{"n":{n}}}' for n in range(state + 1, end + 1)], end


class SessionsCase(SynchronousTestCase):
    """`make` builds the sessions on `self.clock`."""

    def make(self) -> Any:
        raise NotImplementedError

    def setUp(self) -> None:
        self.clock = Clock()
        self.sessions = self.make()

    def settle(self) -> None:
        """Let everything happen that needs no waiting."""
        for _ in range(10):
            self.clock.advance(0)

    def get(self, deferred: Deferred[Any]) -> Any:
        self.settle()
        return self.successResultOf(deferred)

    def fails(self, deferred: Deferred[Any], kind: type[Exception]) -> Failure:
        self.settle()
        return self.failureResultOf(deferred, kind)

    def put(self, uuid: str, times: int = 1) -> list[Message]:
        return [self.get(self.sessions.put(uuid, count_up)) for _ in range(times)]

    def replay(self, uuid: str, id: int) -> list[Message]:
        messages = []
        while (message := self.get(self.sessions.after(uuid, id))) is not None:
            messages.append(message)
            id = message.id
        return messages


class SessionsContract(SessionsCase):
    """What holds in one life of the process as in several."""

    def test_provides_the_interface(self) -> None:
        verifyObject(ISessions, self.sessions)

    def test_put_numbers_messages_from_one_and_carries_the_state_on(self) -> None:
        self.get(self.sessions.register("a", 10))
        self.assertEqual(
            self.put("a", 3), [Message(1, {"n": 11}), Message(2, {"n": 12}), Message(3, {"n": 13})]
        )

    def test_sessions_do_not_touch_each_other(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.get(self.sessions.register("b", 100))
        self.put("a", 2)
        self.assertEqual(self.put("b"), [Message(1, {"n": 101})])
        self.get(self.sessions.ack("a", 2))
        self.assertEqual(self.replay("b", 0), [Message(1, {"n": 101})])

    def test_everything_but_register_fails_for_an_unknown_uuid(self) -> None:
        calls = [
            self.sessions.disconnect("x"), self.sessions.put("x", count_up),
            self.sessions.put_many("x", count_up_to_ten, 1), self.sessions.after("x", 0),
            self.sessions.after_many("x", 0, 1), self.sessions.ack("x", 0),
        ]
        for call in calls:
            self.assertEqual(self.fails(call, UnknownSession).value.uuid, "x")

    def test_any_json_is_state_and_data(self) -> None:
        odd = {"text": "ü\n\u2028\"\\", "none": None, "list": [1.5, [], {}], "big": 2**70}
        self.get(self.sessions.register("a", odd))
        seen = []

        def transform(state: Any) -> tuple[Any, Any]:
            seen.append(state)
            return [state, "\n"], [state]

        message = self.get(self.sessions.put("a", transform))
        self.get(self.sessions.put("a", transform))
        self.assertEqual(seen, [odd, [odd]])
        self.assertEqual(message, Message(1, [odd, "\n"]))
        self.assertEqual(self.get(self.sessions.after("a", 0)), message)

    def test_what_json_cannot_hold_is_refused_and_nothing_changes(self) -> None:
        self.fails(self.sessions.register("bad", object()), NotJson)
        self.fails(self.sessions.put("bad", count_up), UnknownSession)
        self.get(self.sessions.register("a", 0))
        self.fails(self.sessions.put("a", lambda s: (float("nan"), s)), NotJson)
        self.fails(self.sessions.put("a", lambda s: (s, b"bytes")), NotJson)
        self.fails(self.sessions.put_many("a", lambda s, n: (["1\n2"], s), 1), NotJson)
        self.assertEqual(self.put("a"), [Message(1, {"n": 1})])

    def test_a_raising_transform_is_the_failure_and_nothing_changes(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.put("a")

        def broken(state: Any) -> tuple[Any, Any]:
            raise ZeroDivisionError

        self.fails(self.sessions.put("a", broken), ZeroDivisionError)
        self.assertEqual(self.put("a"), [Message(2, {"n": 2})])

    def test_a_transform_that_mutates_its_state_cannot_harm(self) -> None:
        self.get(self.sessions.register("a", {"n": 0}))

        def mutating(state: Any) -> tuple[Any, Any]:
            state["n"] += 1
            if state["n"] == 1:
                raise ZeroDivisionError
            return state["n"], state

        self.fails(self.sessions.put("a", mutating), ZeroDivisionError)
        self.fails(self.sessions.put("a", mutating), ZeroDivisionError)

    def test_puts_are_applied_in_call_order_without_waiting(self) -> None:
        self.get(self.sessions.register("a", 0))
        pending = [self.sessions.put("a", count_up) for _ in range(200)]
        self.assertEqual([self.get(d).data["n"] for d in pending], list(range(1, 201)))

    def test_put_many_gives_the_stored_lines(self) -> None:
        self.get(self.sessions.register("a", 7))
        lines = self.get(self.sessions.put_many("a", count_up_to_ten, 2))
        self.assertEqual(
            lines, Lines(1, 2, b'{"id":1,"data":{"n":8}}\n{"id":2,"data":{"n":9}}\n')
        )
        self.assertEqual(self.get(self.sessions.after_many("a", 0, 10_000)), lines)

    def test_put_many_may_come_back_short_or_empty(self) -> None:
        self.get(self.sessions.register("a", 7))
        self.assertEqual(self.get(self.sessions.put_many("a", count_up_to_ten, 50)).count, 3)
        self.assertEqual(
            self.get(self.sessions.put_many("a", count_up_to_ten, 50)), Lines(4, 0, b"")
        )
        self.assertEqual(len(self.replay("a", 0)), 3)

    def test_put_and_put_many_share_one_sequence(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.put("a")
        self.get(self.sessions.put_many("a", count_up_to_ten, 3))
        self.assertEqual(self.put("a"), [Message(5, {"n": 5})])
        self.assertEqual([m.data["n"] for m in self.replay("a", 0)], [1, 2, 3, 4, 5])

    def test_a_bulk_transform_that_gives_too_many_is_refused(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.fails(self.sessions.put_many("a", lambda s, n: (["1"] * (n + 1), s), 3), ValueError)
        self.assertEqual(self.replay("a", 0), [])

    def test_after_gives_the_next_message_and_none_at_the_end(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.assertIsNone(self.get(self.sessions.after("a", 0)))
        made = self.put("a", 5)
        self.assertEqual(self.replay("a", 0), made)
        self.assertEqual(self.replay("a", 3), made[3:])
        self.assertIsNone(self.get(self.sessions.after("a", 5)))

    def test_after_many_starts_anywhere_and_keeps_to_its_size(self) -> None:
        self.get(self.sessions.register("a", 0))
        for _ in range(3):
            self.get(self.sessions.put_many("a", lambda s, n: (["1"] * n, s), 70))
        whole = b"".join(b'{"id":%d,"data":1}\n' % id for id in range(1, 211))
        for start in (0, 1, 69, 70, 71, 139, 140, 209):
            got, id = b"", start
            while (lines := self.get(self.sessions.after_many("a", id, 1500))).count:
                self.assertEqual(lines.first_id, id + 1)
                self.assertEqual(lines.data.count(b"\n"), lines.count)
                self.assertLess(len(lines.data), 3000)
                got += lines.data
                id = lines.last_id
            self.assertEqual(got, b"".join(whole.splitlines(keepends=True)[start:]))

    def test_hundreds_of_single_puts_replay_from_any_id(self) -> None:
        self.get(self.sessions.register("a", 0))
        made = self.put("a", 200)
        for id in (0, 1, 63, 64, 65, 127, 128, 150, 199):
            self.assertEqual(self.get(self.sessions.after("a", id)), made[id])
        self.get(self.sessions.ack("a", 100))
        self.assertEqual(self.replay("a", 100), made[100:])

    def test_ids_above_the_last_message_are_unknown(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.put("a", 2)
        for call in (self.sessions.ack("a", 3), self.sessions.after("a", 3),
                     self.sessions.after_many("a", 3, 1)):
            self.assertEqual(self.fails(call, UnknownMessage).value.id, 3)

    def test_acks_may_repeat_but_not_go_back(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.put("a", 4)
        self.get(self.sessions.ack("a", 2))
        self.get(self.sessions.ack("a", 2))
        for call in (self.sessions.ack("a", 1), self.sessions.after("a", 1)):
            self.assertEqual(self.fails(call, OutOfOrderAck).value.acked_id, 2)
        self.assertEqual([m.id for m in self.replay("a", 2)], [3, 4])
        self.get(self.sessions.ack("a", 4))
        self.assertEqual([m.id for m in self.put("a")], [5])

    def test_register_again_starts_afresh_until_something_was_acknowledged(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.put("a", 3)
        self.get(self.sessions.ack("a", 0))
        self.get(self.sessions.register("a", 50))
        self.assertEqual(self.replay("a", 0), [])
        self.assertEqual(self.put("a"), [Message(1, {"n": 51})])
        self.get(self.sessions.ack("a", 1))
        self.fails(self.sessions.register("a", 0), SessionInUse)
        self.assertEqual(self.put("a"), [Message(2, {"n": 52})])

    def test_unacknowledged_messages_are_limited(self) -> None:
        def ones(state: Any, count: int) -> tuple[list[str], Any]:
            return ["1"] * count, state

        self.get(self.sessions.register("a", 0))
        self.get(self.sessions.put_many("a", ones, BOUNDS.unacknowledged_max - 1))
        self.fails(self.sessions.put_many("a", ones, 2), TooManyUnacknowledged)
        self.get(self.sessions.put_many("a", ones, 1))
        self.fails(self.sessions.put("a", count_up), TooManyUnacknowledged)
        self.get(self.sessions.ack("a", 10))
        self.get(self.sessions.put_many("a", ones, 10))

    def test_a_refused_operation_does_not_stop_the_expiry(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.put("a", 2)
        self.get(self.sessions.ack("a", 1))
        self.get(self.sessions.disconnect("a"))
        self.fails(self.sessions.ack("a", 9), UnknownMessage)
        self.fails(self.sessions.after("a", 0), OutOfOrderAck)
        self.fails(self.sessions.put("a", lambda state: 1 / 0), ZeroDivisionError)
        self.fails(self.sessions.register("a", 0), SessionInUse)
        self.clock.advance(EXPIRY_SECONDS)
        self.assertEqual(len(self.sessions), 0)

    def test_uuids_states_and_messages_are_limited(self) -> None:
        self.fails(self.sessions.register("u" * 101, 0), TooLarge)
        self.fails(self.sessions.register("\ud800", 0), NotJson)
        self.fails(self.sessions.register("a", "s" * 10_000), TooLarge)
        self.get(self.sessions.register("a", 0))
        self.fails(self.sessions.put("a", lambda state: (state, "s" * 10_000)), TooLarge)
        self.fails(self.sessions.put("a", lambda state: ("d" * 50_000, state)), TooLarge)
        self.assertEqual(self.put("a"), [Message(1, {"n": 1})])

    def test_large_messages_replay_too(self) -> None:
        self.get(self.sessions.register("a", 0))
        pending = [self.sessions.put("a", lambda n: (str(n) * 30_000, (n + 1) % 10))
                   for _ in range(70)]
        made = [self.get(put) for put in pending[-1:]]
        self.assertEqual(self.get(self.sessions.after("a", 69)), made[0])
        self.assertEqual(self.get(self.sessions.after("a", 41)), Message(42, "1" * 30_000))

    def test_a_second_disconnect_does_not_prolong_the_expiry(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.get(self.sessions.disconnect("a"))
        self.clock.advance(EXPIRY_SECONDS - 1)
        self.get(self.sessions.disconnect("a"))
        self.clock.advance(1)
        self.assertEqual(len(self.sessions), 0)

    def test_lines_are_the_json_of_their_messages(self) -> None:
        self.get(self.sessions.register("a", 0))
        made = self.put("a", 3)
        lines = self.get(self.sessions.after_many("a", 0, 10_000))
        self.assertEqual(
            [json.loads(line) for line in lines.data.splitlines()],
            [{"id": m.id, "data": m.data} for m in made],
        )


class ExpiryContract(SessionsCase):
    """What a restart would change, because it disconnects everybody."""

    def test_sessions_are_limited(self) -> None:
        for n in range(BOUNDS.sessions_max):
            self.get(self.sessions.register(str(n), 0))
        self.fails(self.sessions.register("one more", 0), TooManySessions)
        self.get(self.sessions.register("0", 0))
        self.get(self.sessions.disconnect("0"))
        self.clock.advance(EXPIRY_SECONDS)
        self.get(self.sessions.register("one more", 0))

    def test_a_session_expires_after_its_disconnection_and_not_before(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.get(self.sessions.register("b", 0))
        self.get(self.sessions.disconnect("a"))
        self.clock.advance(100)
        self.get(self.sessions.disconnect("b"))
        self.clock.advance(EXPIRY_SECONDS - 100)
        self.assertEqual(len(self.sessions), 1)
        self.clock.advance(100)
        self.assertEqual(len(self.sessions), 0)
        self.fails(self.sessions.after("a", 0), UnknownSession)

    def test_a_connected_session_never_expires(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.clock.advance(EXPIRY_SECONDS * 100)
        self.put("a")

    def test_every_operation_of_a_returning_client_stops_the_expiry(self) -> None:
        operations = {
            "put": lambda: self.sessions.put("put", count_up),
            "put_many": lambda: self.sessions.put_many("put_many", count_up_to_ten, 1),
            "after": lambda: self.sessions.after("after", 0),
            "after_many": lambda: self.sessions.after_many("after_many", 0, 1),
            "ack": lambda: self.sessions.ack("ack", 0),
            "register": lambda: self.sessions.register("register", 0),
        }
        for uuid in operations:
            self.get(self.sessions.register(uuid, 0))
            self.get(self.sessions.disconnect(uuid))
        self.clock.advance(EXPIRY_SECONDS - 1)
        for operation in operations.values():
            self.get(operation())
        self.clock.advance(EXPIRY_SECONDS * 2)
        self.assertEqual(len(self.sessions), len(operations))
        for uuid in operations:
            self.get(self.sessions.disconnect(uuid))
        self.clock.advance(EXPIRY_SECONDS)
        self.assertEqual(len(self.sessions), 0)
