"""The `multibroker` command. Each subcommand is a module with `add_arguments` and `run`."""
