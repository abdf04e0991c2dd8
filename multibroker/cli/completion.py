"""Print a completion script for your shell."""

from __future__ import annotations

import argparse

EXAMPLES = """\
examples:
  source <(multibroker completion bash)
  multibroker completion zsh > ~/.zfunc/_multibroker
  multibroker completion fish > ~/.config/fish/completions/multibroker.fish
"""

BASH = """\
_multibroker() {{
    local words="${{COMP_WORDS[*]:1:COMP_CWORD-1}}"
    case "$words" in
{cases}
    esac
}}
complete -o default -F _multibroker multibroker
"""
BASH_CASE = """\
        {pattern}) COMPREPLY=($(compgen -W "{words}" -- "${{COMP_WORDS[COMP_CWORD]}}"));;"""
ZSH = "#compdef multibroker\nautoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> int:
    tree = dict(_walk())
    if arguments.shell == "fish":
        print("\n".join(_fish(tree)))
    else:
        print((ZSH if arguments.shell == "zsh" else "") + _bash(tree), end="")
    return 0


def _walk() -> list[tuple[tuple[str, ...], list[str]]]:
    """(command path, words that may follow) for every command and subcommand."""
    from multibroker.cli.main import COMMANDS, build_parser

    found: list[tuple[tuple[str, ...], list[str]]] = [((), sorted(COMMANDS))]
    for command in sorted(COMMANDS):
        if command == "serve":
            found.append((("serve",), _serve_options()))
            continue
        parser = build_parser(command)
        found += _descend(_children(parser)[command], (command,))
    return found


def _descend(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> list[tuple[tuple[str, ...], list[str]]]:
    children = _children(parser)
    options = [option for action in parser._actions for option in action.option_strings]
    found = [(path, sorted(children) + options)]
    for name, child in sorted(children.items()):
        found += _descend(child, (*path, name))
    return found


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _serve_options() -> list[str]:
    from multibroker.tap import find_wires, sections

    return ["--config"] + [
        f"--{setting.option}"
        for section in sections(find_wires())
        for setting in section.settings
        if setting.option
    ]


def _bash(tree: dict[tuple[str, ...], list[str]]) -> str:
    # The longest path first: the first pattern that fits wins.
    ordered = sorted(tree.items(), key=lambda item: -len(item[0]))
    cases = (
        BASH_CASE.format(pattern=_pattern(path), words=" ".join(words)) for path, words in ordered
    )
    return BASH.format(cases="\n".join(cases))


def _pattern(path: tuple[str, ...]) -> str:
    words = " ".join(path)
    return f'"{words}"|"{words} "*' if words else "*"


def _fish(tree: dict[tuple[str, ...], list[str]]) -> list[str]:
    lines = ["complete -c multibroker -f"]
    for path, words in tree.items():
        if path:
            condition = "; and ".join(f"__fish_seen_subcommand_from {part}" for part in path)
        else:
            condition = "__fish_use_subcommand"
        names = " ".join(word for word in words if not word.startswith("-"))
        if names:
            lines.append(f"complete -c multibroker -n '{condition}' -a '{names}'")
        for word in words:
            if word.startswith("--"):
                lines.append(f"complete -c multibroker -n '{condition}' -l {word[2:]}")
    return lines
