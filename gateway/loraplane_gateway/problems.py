"""Settings that are refused, a line each, for whoever wrote them; what was written may be a secret, and is left out."""

from collections.abc import Iterator

from pydantic import ValidationError


def problems(error: ValidationError) -> Iterator[str]:
    for each in error.errors(include_input=False, include_url=False):
        name = "".join(f"LORAPLANE_{str(part).upper()}: " for part in each["loc"])
        yield f"{name}{each['msg'].removeprefix('Value error, ')}"
