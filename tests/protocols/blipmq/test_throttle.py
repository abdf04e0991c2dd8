"""Guessing keys is slow, and counting the guesses is bounded."""

from __future__ import annotations

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.blipmq import throttle
from multibroker.protocols.blipmq.throttle import Throttle, address_of


class ThrottleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.throttle = Throttle(self.clock, failures_max=3, window_secs=60)

    def fail(self, times: int, address: str | None = "1.2.3.4") -> None:  # type: ignore[override]
        for _ in range(times):
            self.throttle.failed(address)
            self.clock.advance(1)

    def test_refuses_after_the_last_allowed_failure(self) -> None:
        self.fail(2)
        self.assertFalse(self.throttle.refuses("1.2.3.4"))
        self.fail(1)
        self.assertTrue(self.throttle.refuses("1.2.3.4"))
        self.assertFalse(self.throttle.refuses("1.2.3.5"))

    def test_forgets_failures_that_left_the_window(self) -> None:
        self.fail(3)
        self.clock.advance(56)
        self.assertTrue(self.throttle.refuses("1.2.3.4"))
        self.clock.advance(1)
        self.assertFalse(self.throttle.refuses("1.2.3.4"))
        self.clock.advance(60)
        self.assertFalse(self.throttle.refuses("1.2.3.4"))
        self.assertEqual(len(self.throttle), 0)

    def test_a_limit_of_0_turns_it_off(self) -> None:
        self.throttle = Throttle(self.clock, 0, 60)
        self.fail(5)
        self.assertFalse(self.throttle.refuses("1.2.3.4"))

    def test_the_table_is_bounded_and_forgets_who_failed_longest_ago(self) -> None:
        self.patch(throttle, "ADDRESSES_MAX", 2)
        for address in ("a", "b", "a", "c"):
            self.fail(3, address)
        self.assertEqual(len(self.throttle), 2)
        self.assertFalse(self.throttle.refuses("b"))
        self.assertTrue(self.throttle.refuses("a"))

    def test_nothing_is_counted_without_an_address(self) -> None:
        self.fail(5, None)
        self.assertFalse(self.throttle.refuses(None))


class AddressTests(SynchronousTestCase):
    def test_an_ipv6_network_counts_as_one_address(self) -> None:
        first = address_of(IPv6Address("TCP", "2001:db8::1", 1))
        self.assertEqual(first, address_of(IPv6Address("TCP", "2001:db8::ffff:1", 2)))
        self.assertNotEqual(first, address_of(IPv6Address("TCP", "2001:db8:0:1::1", 1)))

    def test_ports_zones_and_mapped_addresses_make_no_difference(self) -> None:
        self.assertEqual(address_of(IPv4Address("TCP", "1.2.3.4", 5)), "1.2.3.4")
        self.assertEqual(address_of(IPv6Address("TCP", "::ffff:1.2.3.4", 5)), "1.2.3.4")
        self.assertEqual(address_of(IPv6Address("TCP", "fe80::1%eth0", 5)), "fe80::/64")

    def test_a_unix_socket_has_none(self) -> None:
        self.assertIsNone(address_of(UNIXAddress("/x")))
