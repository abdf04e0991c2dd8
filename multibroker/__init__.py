"""One durable log, five messaging dialects."""

__version__ = "0.1.0"
