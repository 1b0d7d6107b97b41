"""Waiting for a Postgres that is being started beside us."""

import time
from time import sleep

from psycopg import ProgrammingError, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from loraplane_core.errors import Unavailable
from loraplane_gateway.db.engine import CONNECT_SECONDS, driver_url

POLL_SECONDS = 0.5
_SILENT = {pq.Ping.REJECT: "it is starting or stopping", pq.Ping.NO_RESPONSE: "nobody answers there"}


def until_it_answers(url: str, seconds: float) -> None:
    """Until the server takes connections, whatever it then says to a password: waiting would not make that right.

    Raises Unavailable (code `database_unavailable`) after `seconds`, and ValueError for a URL that names no server.
    """
    driver_url(url)
    deadline = time.monotonic() + seconds
    try:
        asked = make_conninfo(url, connect_timeout=CONNECT_SECONDS).encode()
    except ProgrammingError as error:
        raise ValueError(f"the database URL: {error}") from error
    while (answer := pq.PGconn.ping(asked)) in _SILENT:
        if time.monotonic() + POLL_SECONDS > deadline:
            raise Unavailable(_refusal(url, seconds, _SILENT[pq.Ping(answer)]), code="database_unavailable")
        sleep(POLL_SECONDS)
    if answer != pq.Ping.OK:
        raise ValueError("the database URL: nothing could be asked with it")


def _refusal(url: str, seconds: float, why: str) -> str:
    named = conninfo_to_dict(url)
    where = f"{named.get('host') or 'the local socket'}:{named.get('port') or 5432}"
    return f"the database at {where} took no connection within {seconds:g} s: {why}; start it, or wait longer (--wait)"
