"""Kubernetes quantities, as far as memory needs them: `64Mi`, `2Gi`, `1.5G`, plain integers of bytes."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

QUANTITY_PATTERN = r"^[0-9]{1,18}(\.[0-9]{1,9})?(k|M|G|T|Ki|Mi|Gi|Ti)?$"
_QUANTITY = re.compile(QUANTITY_PATTERN)
_FACTORS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


def parse_quantity(text: str | int) -> int:
    """Bytes, rounded up. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or isinstance(text, bool):
        raise ValueError('must be an amount of memory such as "64Mi", "2Gi" or a whole number of bytes')
    suffix = match[2] or ""
    amount = Decimal(str(text).removesuffix(suffix)) * _FACTORS[suffix]
    return int(amount.to_integral_value(rounding="ROUND_CEILING"))


def _check(value: object) -> object:
    if isinstance(value, str | int):
        parse_quantity(value)
        return str(value)
    return value


#: Held as text, as the user wrote it; parse_quantity gives the bytes.
Quantity = Annotated[
    str,
    BeforeValidator(_check),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minimum": 0,
            "maximum": 10**18 - 1,
            "pattern": QUANTITY_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
