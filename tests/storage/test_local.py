from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.local import LocalStorage
from tests.storage.contract import StorageContract


class AlwaysContractTests(StorageContract, TestCase):
    policy = "always"

    def make_storage(self) -> Any:
        return LocalStorage(self.mktemp(), reactor, FsyncPolicy.parse(self.policy))


class IntervalContractTests(AlwaysContractTests):
    policy = "interval:10"


class NeverContractTests(AlwaysContractTests):
    policy = "never"
