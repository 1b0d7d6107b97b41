"""Times that Postgres has and Python has not: `infinity`, and years before 1 and after 9999.

Rows may be written by hand (design section 6), where `infinity` is a natural word for "never". The driver refuses to
read such a value, and with it the whole answer: one row of one tenant would end the feed of all. So it is read as
the nearest time that Python has.
"""

import datetime
from typing import Any

import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.types.datetime import TimestamptzLoader

_OID = psycopg.adapters.types["timestamptz"].oid
_STRICT = psycopg.adapters.get_loader(_OID, Format.TEXT) or TimestamptzLoader
_EARLIEST = datetime.datetime.min.replace(tzinfo=datetime.UTC)
_LATEST = datetime.datetime.max.replace(tzinfo=datetime.UTC)


class BoundedTimes(Loader):
    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._strict = _STRICT(oid, context)

    def load(self, data: Buffer) -> datetime.datetime:
        try:
            found: datetime.datetime = self._strict.load(data)
        except psycopg.DataError:
            text = bytes(data)
            return _EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else _LATEST
        return found


def register(connection: Any, _: object = None) -> None:
    """On a connection of SQLAlchemy's, as it hears of a new one."""
    connection.driver_connection.adapters.register_loader(_OID, BoundedTimes)
