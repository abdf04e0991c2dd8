"""TANK: the log protocol of the original broker of that name (docs/protocols/tank.md)."""
