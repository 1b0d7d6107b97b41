"""Where adapters and base models may come from. A path is relative to a root that the platform chose.

The grammar is one gate; whoever opens the file also resolves it and checks that it lies below its root.
"""

import re

#: Segments of plain characters: no leading slash, backslash, NUL or empty segment can match.
PATH = r"[A-Za-z0-9._@+=-]+(/[A-Za-z0-9._@+=-]+)*"
FILE_PATTERN = rf"^file:{PATH}$"
BASE_PATTERN = rf"^(file:|pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?/){PATH}$"
#: A segment `.` or `..`; RE2 has no look-ahead, so this is a second expression in CEL too.
DOT_SEGMENT = r"[:/][.][.]?(/|$)"
MAX_LENGTH = 1024

_UNHONOURED = ("s3://", "hf://", "https://")
_PATH_HELP = "a relative path without '.', '..', backslashes or unusual characters"
SOURCE_MESSAGE = f"must be file:PATH with {_PATH_HELP}; s3://, hf:// and https:// are not honoured yet"
BASE_MESSAGE = f"must be file:PATH or pvc://CLAIM/PATH with {_PATH_HELP}"


def source_path(uri: str) -> str:
    """The path of a `file:` source, relative to the adapter root. Raises ValueError with the reason."""
    for scheme in _UNHONOURED:
        if uri.startswith(scheme):
            raise ValueError(
                f"{scheme} sources are not honoured yet; use file:PATH below the adapter root or an upload"
            )
    if not _matches(FILE_PATTERN, uri):
        raise ValueError(SOURCE_MESSAGE)
    return uri.removeprefix("file:")


def base_location(uri: str) -> tuple[str | None, str]:
    """(volume claim or None for the model root, path below it). Raises ValueError with the reason."""
    if not _matches(BASE_PATTERN, uri):
        raise ValueError(BASE_MESSAGE)
    if uri.startswith("file:"):
        return None, uri.removeprefix("file:")
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    return claim, path


def _matches(pattern: str, uri: str) -> bool:
    return len(uri) <= MAX_LENGTH and re.fullmatch(pattern, uri) is not None and re.search(DOT_SEGMENT, uri) is None


def cel(field: str, pattern: str) -> str:
    """The same two tests as a CEL expression."""
    return f"{field}.matches('{pattern}') && !{field}.matches('{DOT_SEGMENT}')"
