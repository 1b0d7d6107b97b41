"""Where adapters and base models may come from. A path is relative to a root that the platform chose.

The grammar is one gate; whoever opens the file also resolves it and checks that it lies below its root.
"""

from loraplane_core.resources.base import NAME_PATTERN, Grammar

#: Segments of plain characters: no leading slash, backslash, NUL or empty segment can match.
_PATH = r"[A-Za-z0-9._@+=-]+(/[A-Za-z0-9._@+=-]+)*"
_CLAIM = f"{NAME_PATTERN}([.]{NAME_PATTERN})*"
#: A segment `.` or `..`; RE2 has no look-ahead, so this is an expression of its own.
_DOT_SEGMENT = "[:/][.][.]?(/|$)"
MAX_LENGTH = 1024

_UNHONOURED = ("s3://", "hf://", "https://")
_PATH_HELP = "a relative path without '.', '..', backslashes or unusual characters"
_SOURCE_HELP = f"must be file:PATH with {_PATH_HELP}"
_BASE_HELP = f"must be file:PATH or pvc://CLAIM/PATH with {_PATH_HELP}"


def _grammar(pattern: str, message: str, noun: str, instead: str) -> Grammar:
    refused = [(f"^{scheme}", f"{scheme} {noun} are not honoured yet; use {instead}") for scheme in _UNHONOURED]
    return Grammar(pattern, message, (*refused, (_DOT_SEGMENT, message)))


SOURCE = _grammar(f"file:{_PATH}", _SOURCE_HELP, "sources", "file:PATH below the adapter root or an upload")
BASE = _grammar(
    f"(file:|pvc://{_CLAIM}/){_PATH}", _BASE_HELP, "bases", "file:PATH below the model root or pvc://CLAIM/PATH"
)


def source_path(uri: str) -> str:
    """The path of a `file:` source, relative to the adapter root. Raises ValueError with the reason."""
    return SOURCE.check(_bounded(uri)).removeprefix("file:")


def base_location(uri: str) -> tuple[str | None, str]:
    """(volume claim or None for the model root, path below it). Raises ValueError with the reason."""
    BASE.check(_bounded(uri))
    if uri.startswith("file:"):
        return None, uri.removeprefix("file:")
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    return claim, path


def _bounded(uri: str) -> str:
    if len(uri) > MAX_LENGTH:
        raise ValueError(f"must have at most {MAX_LENGTH} characters")
    return uri
