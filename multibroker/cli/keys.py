"""Add, list or remove API keys in a keys file.

A key is shown once, when it is made; the file holds only its hash. A running broker reads the
file again on SIGHUP.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from multibroker import keys
from multibroker.keys import ApiKey, KeyFileError, TopicRules

EXAMPLES = """examples:
  multibroker keys add billing
  multibroker keys add sensors --publish 'sensors.*' --no-subscribe
  multibroker keys add old-client --stdin < key.txt
  multibroker keys list
  multibroker keys remove billing && kill -HUP $(cat twistd.pid)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, Path("multibroker-data"), None, False)
    # The same options may follow the action; there they must not undo what stood before it.
    common = argparse.ArgumentParser(add_help=False)
    _add_common(common, argparse.SUPPRESS, argparse.SUPPRESS, argparse.SUPPRESS)
    actions = parser.add_subparsers(dest="action", metavar="add|list|remove", required=True)
    actions.add_parser("list", help="show names and rules", parents=[common])
    removing = actions.add_parser("remove", help="take a key out", parents=[common])
    removing.add_argument("name")
    adding = actions.add_parser("add", help="make a key and print it", parents=[common])
    adding.add_argument("name")
    for rule, verb in (("publish", "publish to"), ("subscribe", "subscribe to")):
        group = adding.add_mutually_exclusive_group()
        group.add_argument(
            f"--{rule}",
            action="append",
            metavar="GLOB",
            help=f"topics it may {verb} (repeatable; default: all)",
        )
        group.add_argument(
            f"--no-{rule}",
            dest=rule,
            action="store_const",
            const=[],
            help=f"it may not {verb} any topic",
        )
    adding.add_argument(
        "--stdin", action="store_true", help="read the key from standard input instead"
    )


def _add_common(
    parser: argparse.ArgumentParser, data_dir: object, file: object, as_json: object
) -> None:
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=data_dir,
        metavar="DIR",
        help="data directory of the broker, whose keys file is used (default: multibroker-data)",
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=file,
        metavar="FILE",
        help="another keys file (setting blipmq.keys-file)",
    )
    parser.add_argument("--json", action="store_true", default=as_json, help="print JSON")


def run(args: argparse.Namespace) -> int:
    path: Path = args.file or args.data_dir / keys.FILE_NAME
    if args.action == "add":
        _add(path, args)
    elif args.action == "list":
        _list(path, args.json)
    else:
        keys.remove(path, args.name)
        _say(args.json, {"removed": args.name}, f"removed {args.name} from {path}")
    return 0


def _add(path: Path, args: argparse.Namespace) -> None:
    key = _read_key() if args.stdin else keys.generate()
    keys.add(path, keys.make_key(args.name, key, args.publish, args.subscribe))
    # Somebody who brought the key knows it; it need not stand in a terminal's history.
    shown = {} if args.stdin else {"key": key}
    text = f"added {args.name} to {path}" if args.stdin else key
    _say(args.json, {"name": args.name, **shown, "file": str(path)}, text)
    if not args.stdin and not args.json:
        print(
            f"This is the only time the key of {args.name} is shown. It is valid once the broker"
            " has read the file again (SIGHUP).",
            file=sys.stderr,
        )


def _read_key() -> str:
    key = sys.stdin.readline().strip()
    if len(key) < keys.KEY_CHARACTERS_MIN or len(key.encode()) > keys.KEY_BYTES_MAX:
        raise KeyFileError(
            f"a key has at least {keys.KEY_CHARACTERS_MIN} characters"
            f" and at most {keys.KEY_BYTES_MAX} bytes"
        )
    return key


def _list(path: Path, as_json: bool) -> None:
    entries = keys.load(path) if path.exists() else []
    if as_json:
        print(json.dumps([_described(entry) for entry in entries]))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        publish, subscribe = _text(entry.publish), _text(entry.subscribe)
        print(f"{entry.name.ljust(width)}  publish {publish}  subscribe {subscribe}")
    if not entries:
        print(f"{path} has no keys: nobody can authenticate with it", file=sys.stderr)


def _described(entry: ApiKey) -> dict[str, object]:
    return {
        "name": entry.name,
        "publish": entry.publish.patterns,
        "subscribe": entry.subscribe.patterns,
    }


def _text(rules: TopicRules) -> str:
    if rules.patterns is None:
        return "everything"
    return ", ".join(rules.patterns) or "nothing"


def _say(as_json: bool, document: dict[str, str], text: str) -> None:
    print(json.dumps(document) if as_json else text)
