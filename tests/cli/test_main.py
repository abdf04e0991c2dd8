"""The `multibroker` command: help everywhere, clear errors, meaningful exit codes."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli.completion import _bash, _walk
from multibroker.cli.main import COMMANDS, build_parser, load, main


class HelpTests(SynchronousTestCase):
    def output(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as exit:
                code = int(exit.code or 0)
        return code, out.getvalue(), err.getvalue()

    def test_every_command_has_help_with_examples(self) -> None:
        for command in COMMANDS:
            if command == "serve":
                continue
            code, out, _ = self.output(command, "--help")
            self.assertEqual(code, 0, command)
            self.assertIn("examples:", out, command)
            self.assertTrue(load(command).__doc__, command)

    def test_the_list_of_commands_is_complete(self) -> None:
        code, out, _ = self.output("--help")
        self.assertEqual(code, 0)
        for command in COMMANDS:
            self.assertIn(command, out)

    def test_wrong_usage_is_two_and_a_failure_is_one(self) -> None:
        self.assertEqual(self.output("no-such-command")[0], 2)
        self.assertEqual(self.output("topics")[0], 2)
        code, _, err = self.output("topics", "--url", "http://127.0.0.1:1", "list")
        self.assertEqual(code, 1)
        self.assertIn("no broker answers", err)
        self.assertEqual(err.count("\n"), 1)

    def test_completion_offers_commands_actions_and_options(self) -> None:
        tree = dict(_walk())
        self.assertEqual(tree[()], sorted(COMMANDS))
        self.assertIn("create", tree["topics",])
        self.assertIn("--partitions", tree["topics", "create"])
        self.assertIn("--fsync", tree["serve",])

    def test_the_bash_script_completes(self) -> None:
        script = _bash(dict(_walk()))
        ask = (
            f"{script}\nCOMP_WORDS=(multibroker topics cr) COMP_CWORD=2\n"
            '_multibroker; echo "${COMPREPLY[*]}"'
        )
        answer = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
        self.assertEqual(answer.stdout.strip(), "create")

    def test_a_parser_is_built_for_each_command(self) -> None:
        for command in COMMANDS:
            if command != "serve":
                build_parser(command)
