"""API keys: the file, the rules, and that a key is nowhere but with its owner."""

from __future__ import annotations

import stat
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker import keys
from multibroker.errors import ConfigError
from multibroker.keys import ApiKey, KeyFileError, KeyRing, TopicRules, make_key


class KeyRingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.entries = [make_key("a", "key of a"), make_key("b", "key of b")]
        self.ring = KeyRing(self.entries)

    def test_a_key_finds_its_entry(self) -> None:
        self.assertEqual([self.ring.find(b"key of a"), self.ring.find(b"key of b")], self.entries)

    def test_a_wrong_key_finds_nothing(self) -> None:
        for wrong in (b"", b"key of", b"key of a ", b"KEY OF A", self.entries[0].digest):
            self.assertIsNone(self.ring.find(wrong))

    def test_no_keys_let_nobody_in(self) -> None:
        self.assertIsNone(KeyRing().find(b""))

    def test_every_entry_is_compared_in_constant_time_whatever_is_found(self) -> None:
        with mock.patch.object(keys.hmac, "compare_digest", wraps=keys.hmac.compare_digest) as seen:
            self.ring.find(b"key of a")
            self.assertEqual(seen.call_count, 2)
            self.ring.find(b"nobody's")
            self.assertEqual(seen.call_count, 4)

    def test_an_overlong_key_is_not_even_hashed(self) -> None:
        with mock.patch.object(keys.hashlib, "sha256") as hashed:
            self.assertIsNone(self.ring.find(bytes(keys.KEY_BYTES_MAX + 1)))
        hashed.assert_not_called()

    def test_current_gives_the_rules_of_now_and_nothing_for_a_removed_or_replaced_key(self) -> None:
        a = self.entries[0]
        narrowed = ApiKey("a", a.salt, a.digest, TopicRules(["x"]))
        self.assertIs(KeyRing([narrowed]).current(a), narrowed)
        self.assertIsNone(KeyRing([make_key("a", "another")]).current(a))
        self.assertIsNone(KeyRing().current(a))

    def test_a_key_given_as_an_option_has_the_same_name_at_every_start(self) -> None:
        first, second = keys.unnamed_key("quick"), keys.unnamed_key("quick")
        self.assertEqual(first.name, second.name)
        self.assertNotEqual(first.name, keys.unnamed_key("other").name)
        self.assertIs(KeyRing([first]).find(b"quick"), first)

    def test_nothing_secret_is_in_a_representation(self) -> None:
        entry = self.entries[0]
        for secret in ("key of a", entry.digest.hex(), repr(entry.digest)):
            self.assertNotIn(secret, repr(entry))


class TopicRulesTests(SynchronousTestCase):
    def test_no_rules_allow_every_topic_and_empty_rules_none(self) -> None:
        self.assertTrue(TopicRules().allow(b"anything"))
        self.assertFalse(TopicRules([]).allow(b"anything"))

    def test_globs(self) -> None:
        rules = TopicRules(["orders.*", "log-[ab]", "q?"])
        for topic in (b"orders.", b"orders.eu.paid", b"log-a", b"q1", "qä".encode()):
            self.assertTrue(rules.allow(topic), topic)
        for topic in (b"orders", b"Orders.eu", b"log-c", b"q", b"q12", b"x\norders.eu"):
            self.assertFalse(rules.allow(topic), topic)

    def test_answers_are_remembered_for_a_bounded_number_of_topics(self) -> None:
        rules = TopicRules(["a*"])
        for number in range(3 * keys.CACHED_TOPICS_MAX):
            self.assertTrue(rules.allow(b"a%d" % number))
        self.assertLessEqual(len(rules._known), keys.CACHED_TOPICS_MAX)


class KeysFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp()) / "deep" / "keys"

    def test_what_is_added_is_loaded_again_with_its_rules(self) -> None:
        entry = make_key("a@b", "secret", ["orders.*", "with space,comma%"], [])
        keys.add(self.path, entry)
        keys.add(self.path, make_key("other", "secret 2"))
        first, second = keys.load(self.path)
        self.assertEqual(first, entry)
        self.assertEqual((second.publish, second.subscribe), (TopicRules(), TopicRules()))

    def test_the_file_is_its_owners_and_holds_no_key(self) -> None:
        keys.add(self.path, make_key("a", "secret"))
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertNotIn("secret", self.path.read_text())

    def test_the_same_key_twice_has_two_digests(self) -> None:
        self.assertNotEqual(make_key("a", "same").digest, make_key("b", "same").digest)

    def test_a_name_is_taken_only_once(self) -> None:
        keys.add(self.path, make_key("a", "1"))
        self.assertRaises(KeyFileError, keys.add, self.path, make_key("a", "2"))

    def test_removing_keeps_comments_and_the_others(self) -> None:
        keys.add(self.path, make_key("a", "1"))
        self.path.write_text("# mine\n\n" + self.path.read_text().rstrip("\n"))
        keys.add(self.path, make_key("b", "2"))
        keys.remove(self.path, "a")
        self.assertEqual([entry.name for entry in keys.load(self.path)], ["b"])
        self.assertTrue(self.path.read_text().startswith("# mine\n"))

    def test_removing_an_unknown_key_or_from_no_file_says_so(self) -> None:
        self.assertRaises(ConfigError, keys.remove, self.path, "a")
        keys.add(self.path, make_key("a", "1"))
        self.assertRaises(KeyFileError, keys.remove, self.path, "b")

    def test_bad_lines_are_refused_by_number_and_without_their_content(self) -> None:
        good = make_key("good", "1").line()
        digest = good.split()[1]
        for bad in (
            "lonely",
            "name plaintextkey",
            "name md5:00:00",
            "name sha256:zz:zz",
            "name sha256:00:00",
            f"na/me {digest}",
            f"name {digest} publish",
            f"name {digest} write=*",
            f"name {digest} publish=a publish=b",
            f"good {digest}",
        ):
            error = self.assertRaises(ConfigError, keys.parse, f"{good}\n{bad}\n")
            self.assertIn("line 2", str(error), bad)
            self.assertNotIn("plaintextkey", str(error))

    def test_bad_names_are_refused_before_they_are_written(self) -> None:
        for name in ("", "#a", "a b", "a\nb", "x" * 65, "-a"):
            self.assertRaises(KeyFileError, make_key, name, "1")

    @given(st.lists(st.text(min_size=1, max_size=8), max_size=4))
    @settings(max_examples=60, deadline=None)
    def test_any_patterns_survive_the_file(self, patterns: list[str]) -> None:
        entry = make_key("a", "1", patterns, None)
        self.assertEqual(keys.parse(entry.line()), [entry])


class DevelopmentKeyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.data_dir = Path(self.mktemp())

    def test_it_is_made_once_and_opens_the_door(self) -> None:
        plain = keys.development_key(self.data_dir)
        assert plain is not None
        key = plain.read_text().strip()
        self.assertEqual(stat.S_IMODE(plain.stat().st_mode), 0o600)
        self.assertEqual(keys.development_key(self.data_dir), plain)
        self.assertEqual(plain.read_text().strip(), key)
        found = KeyRing(keys.load(self.data_dir / "keys")).find(key.encode())
        assert found is not None
        self.assertEqual(found.name, "development")

    def test_it_is_not_made_beside_keys_of_somebodys_own(self) -> None:
        keys.add(self.data_dir / "keys", make_key("mine", "1"))
        self.assertIsNone(keys.development_key(self.data_dir))
        self.assertFalse((self.data_dir / "development-key").exists())

    def test_once_removed_it_stays_removed_beside_other_keys(self) -> None:
        keys.development_key(self.data_dir)
        keys.add(self.data_dir / "keys", make_key("mine", "1"))
        keys.remove(self.data_dir / "keys", "development")
        self.assertIsNone(keys.development_key(self.data_dir))
