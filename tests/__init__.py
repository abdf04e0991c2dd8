"""Tests, room by room as in multibroker/."""

from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail: no test judges by the clock.
settings.register_profile(
    "multibroker", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("multibroker")
