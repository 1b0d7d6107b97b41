"""JSON log lines on stderr; what a call passes as `extra` becomes fields."""

import json
import logging
import re
import sys
import time

#: kopf tries a watch that is refused for ever, every two seconds, and says so each time: a namespace that was deleted
#: would fill the log.
_TRY = re.compile(r"Request attempt #(\d+)")
_TOLD_TRIES = 3
_TOLD_EVERY = 100
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Sparing(logging.Filter):
    """The first tries of a request, and then one in a hundred."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = _TRY.match(record.getMessage())
        return found is None or (tries := int(found[1])) <= _TOLD_TRIES or tries % _TOLD_EVERY == 0


def configure(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)  # else they are the only lines that are no JSON
    logging.getLogger("kopf._cogs.clients.watching").addFilter(Sparing())
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request otherwise
