"""Typed reading of one request body; every refusal names the field."""

from typing import Any

from loraplane_core.errors import InvalidParameter


class Fields:
    """A JSON object whose fields are taken one by one. null means: not given (as OpenAI has it)."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._taken: set[str] = set()

    def raw(self, name: str) -> Any:
        self._taken.add(name)
        return self._values.get(name)

    def rest(self) -> list[str]:
        """Names given but never asked for."""
        return [name for name in self._values if name not in self._taken]

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise wrong(name, "a boolean", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(name, "an integer", value)
        _check_range(name, value, low, high)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, "a number", value)
        _check_range(name, value, low, high)
        return float(value)

    def text(self, name: str) -> str:
        value = self.raw(name)
        if value is None:
            raise InvalidParameter(f"`{name}` is required", param=name)
        if not isinstance(value, str):
            raise wrong(name, "a string", value)
        return value


def wrong(name: str, wanted: str, value: Any) -> InvalidParameter:
    return InvalidParameter(f"`{name}` must be {wanted}, not {_kind(value)}", param=name)


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidParameter(f"`{name}` must lie between {low} and {high}", param=name)
