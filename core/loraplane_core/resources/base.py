"""What all resource models share: camelCase on the wire, strict types, unknown fields refused."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

from loraplane_core.identity import NAME_MAX

NAME_PATTERN = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME_HELP = "must be a DNS label: lower-case letters, digits and '-', with a letter or digit at both ends"
IMMUTABLE = "is immutable, also from unset; delete the object and create another"


class Rule:
    """One CEL rule of a generated CRD (`x-kubernetes-validations`). `message` is fixed text on purpose:
    messageExpression with conversions exceeds the API server's cost budget.

    `on_create`: an object that has the fault already stays writable, for its finalizer must come off.
    """

    def __init__(self, rule: str, message: str, field_path: str = "", *, on_create: bool = False) -> None:
        self.rule = f"oldSelf.hasValue() || ({rule})" if on_create else rule
        self.message = message
        self.field_path = field_path
        self.on_create = on_create

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rule": self.rule, "message": self.message}
        found |= {"fieldPath": self.field_path} if self.field_path else {}
        return found | ({"optionalOldSelf": True} if self.on_create else {})


def rules(*listed: Rule) -> dict[str, Any]:
    return {"x-kubernetes-validations": [rule.as_dict() for rule in listed]}


@dataclass(frozen=True)
class Grammar:
    """A constraint on text and what a person reads otherwise, in the same words here and on the API server.

    Not `pattern` of the schema: the API server would answer with the expression instead of the words. Patterns
    must read the same in Python, RE2 and a CEL string: no backslash, no quote.
    """

    pattern: str
    """The whole text matches it."""
    message: str
    refused: tuple[tuple[str, str], ...] = ()
    """(pattern that occurs nowhere in the text, message); these come first."""

    def check(self, text: str) -> str:
        for pattern, message in self.refused:
            if re.search(pattern, text):
                raise ValueError(message)
        if not re.fullmatch(self.pattern, text):
            raise ValueError(self.message)
        return text

    def rules(self) -> dict[str, Any]:
        listed = [Rule(f"!self.matches('{pattern}')", message) for pattern, message in self.refused]
        return rules(*listed, Rule(f"self.matches('^({self.pattern})$')", self.message))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **self.rules()}


#: A DNS label (identity.is_name).
Name = Annotated[str, Field(max_length=NAME_MAX), Grammar(NAME_PATTERN, NAME_HELP)]
Digest = Annotated[str, Field(max_length=64), Grammar("[0-9a-f]{64}", "must be 64 lower-case hexadecimal digits")]


def without_nulls(value: object) -> object:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


@functools.cache
def _integers(model: type[BaseModel]) -> frozenset[str]:
    """The fields that hold an integer, by both of their names."""
    found = [
        (name, field.alias or name)
        for name, field in model.model_fields.items()
        if int in (field.annotation, *get_args(field.annotation))
    ]
    return frozenset(name for names in found for name in names)


class Model(BaseModel):
    """Python names are snake_case; `to_wire` and documents use camelCase. Nulls mean absent, as on an API server."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _as_stored(cls, value: object) -> object:
        """JSON as an API server keeps it: no nulls, and 1.0 is an integer where one is expected."""
        found = without_nulls(value)
        if not isinstance(found, dict):
            return found
        for name in _integers(cls) & found.keys():
            number = found[name]
            if isinstance(number, float) and number.is_integer():
                found[name] = int(number)
        return found

    def to_wire(self) -> dict[str, Any]:
        """camelCase, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Report(Model):
    """A status part: unknown fields are ignored, because another release may have written it."""

    model_config = ConfigDict(extra="ignore")


Strings = Annotated[dict[str, str], BeforeValidator(without_nulls)]


class OwnerReference(Report):
    api_version: str
    kind: str
    name: str
    uid: str


class ObjectMeta(Report):
    """The part of Kubernetes' ObjectMeta that Loraplane reads."""

    name: Name
    namespace: Name = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: Strings = {}
    annotations: Strings = {}
    finalizers: list[str] = []
    owner_references: list[OwnerReference] = []
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
