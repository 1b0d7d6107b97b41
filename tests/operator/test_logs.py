"""What reaches the log of the operator."""

import logging

import pytest
from kopf._cogs.clients import watching

from loraplane_operator.logs import Sparing


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Request attempt #1 failed; will retry: GET /pods -> APIForbiddenError()", True),
        ("Request attempt #3 failed; will retry: GET /pods -> APIForbiddenError()", True),
        ("Request attempt #4 failed; will retry: GET /pods -> APIForbiddenError()", False),
        ("Request attempt #200 failed; will retry: GET /pods -> APIForbiddenError()", True),
        ("Starting the watch-stream for pods", True),
    ],
)
def test_a_watch_that_is_refused_for_ever_does_not_fill_the_log(message: str, told: bool) -> None:
    record = logging.LogRecord(watching.logger.name, logging.ERROR, __file__, 1, message, (), None)
    assert Sparing().filter(record) is told


def test_the_name_of_that_logger_is_kopfs() -> None:
    assert watching.logger.name == "kopf._cogs.clients.watching"
