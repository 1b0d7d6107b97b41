"""Kubernetes quantities, as far as memory needs them: `64Mi`, `2Gi`, `1.5G`, plain integers of bytes."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from loraplane_core.resources.base import Rule, rules, without_nulls

_NUMBER = "[0-9]{1,18}([.][0-9]{1,9})?"
_MEMORY = f"{_NUMBER}(k|M|G|T|Ki|Mi|Gi|Ti)?"
_MEMORY_HELP = 'must be an amount of memory such as "64Mi", "2Gi" or a whole number of bytes'
_AMOUNT = f"{_NUMBER}(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_AMOUNT_HELP = 'must be an amount such as "500m", 2 or "4Gi"'
_LENGTH_MAX = 32
_QUANTITY = re.compile(_MEMORY)
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
        raise ValueError(_MEMORY_HELP)
    suffix = match[2] or ""
    amount = Decimal(str(text).removesuffix(suffix)) * _FACTORS[suffix]
    return int(amount.to_integral_value(rounding="ROUND_CEILING"))


def _check_memory(value: object) -> object:
    if not isinstance(value, str | int):
        raise ValueError(_MEMORY_HELP)
    parse_quantity(value)
    return str(value)


def _check_amount(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int) or not re.fullmatch(_AMOUNT, str(value)):
        raise ValueError(_AMOUNT_HELP)
    return value


def _schema(pattern: str, message: str) -> WithJsonSchema:
    rule = f"type(self) == int ? self >= 0 && self < {10**18} : self.matches('^({pattern})$')"
    return WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": _LENGTH_MAX,
            "x-kubernetes-int-or-string": True,
            **rules(Rule(rule, message)),
        }
    )


#: Held as text, as the user wrote it; parse_quantity gives the bytes.
Quantity = Annotated[str, BeforeValidator(_check_memory), _schema(_MEMORY, _MEMORY_HELP)]
#: What Kubernetes takes for a container, without the odd: signs, exponents, more than nine decimals.
Amount = Annotated[int | str, BeforeValidator(_check_amount), _schema(_AMOUNT, _AMOUNT_HELP)]
Amounts = Annotated[dict[str, Amount], Field(max_length=16), BeforeValidator(without_nulls)]
