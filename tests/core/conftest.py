"""Property tests here: the same examples in every run, and no wall-clock verdicts on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("core")
