"""URLs that hold a password, checked where settings are read.

A password with a plain / ? # @ or % in it shifts the parts of its URL: libraries then take a piece of it for a host, a
port or a code, and tell that piece in their errors. Such a URL is refused here, without a word of it.
"""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

REDIS_SCHEMES = ("redis", "rediss", "unix")
REDIS_FORM = "redis://[:PASSWORD@]HOST:PORT/NUMBER"
_NO_CODE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def check_url(url: str, schemes: Iterable[str], form: str) -> None:
    """Raises ValueError, which names the `form` that it should have and nothing of the URL."""
    if not _is_plain(url, schemes):
        raise ValueError(
            f"the URL must read {form}; in a name or password write what is neither a letter nor a digit as %XX"
        )


def _is_plain(url: str, schemes: Iterable[str]) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # reading it is the check of it
    except ValueError:
        return False
    after = f"{parts.path}{parts.query}"
    in_parts = "@" not in after and not parts.fragment and parts.netloc.count("@") <= 1
    return parts.scheme in schemes and f"{parts.scheme}://" in url and in_parts and not _NO_CODE.search(url)
