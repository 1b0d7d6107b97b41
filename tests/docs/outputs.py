"""Whether a document shows what a command prints: numbers, ages and `…` may differ, words may not."""

import re

_PARTS = re.compile(r"(…|\s+|[0-9][\w.:+]*)")


def missing(shown: str, printed: str) -> list[str]:
    """Lines of `shown` that `printed` has no counterpart of, each in its turn."""
    lines = [line.rstrip() for line in printed.splitlines()]
    found, at = [], 0
    for line in filter(None, (each.rstrip() for each in shown.splitlines())):
        pattern = re.compile("".join(map(_pattern, _PARTS.split(line))))
        match = next((number for number, each in enumerate(lines[at:], at) if pattern.fullmatch(each)), None)
        if match is None:
            found.append(line)
        else:
            at = match + 1
    return found


def _pattern(part: str) -> str:
    if part == "…":
        return ".*"
    if part.isspace():
        return r"\s+"
    return r"[0-9][\w.:+]*" if part[:1].isdigit() else re.escape(part)
