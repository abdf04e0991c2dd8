"""Follow a topic by any protocol and print its messages (the same as sub)."""

from multibroker.cli.sub import EXAMPLES, add_arguments, run

__all__ = ["EXAMPLES", "add_arguments", "run"]
