"""What all resource models share: camelCase on the wire, strict types, unknown fields refused."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from loraplane_core.identity import NAME_MAX

NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DIGEST_PATTERN = r"^[0-9a-f]{64}$"

#: A DNS label (identity.is_name).
Name = Annotated[str, Field(pattern=NAME_PATTERN, min_length=1, max_length=NAME_MAX)]
Digest = Annotated[str, Field(pattern=DIGEST_PATTERN, max_length=64)]


class Rule:
    """One CEL rule of a generated CRD (`x-kubernetes-validations`). `message` is fixed text on purpose:
    messageExpression with conversions exceeds the API server's cost budget."""

    def __init__(self, rule: str, message: str, field_path: str = "") -> None:
        self.rule = rule
        self.message = message
        self.field_path = field_path

    def as_dict(self) -> dict[str, str]:
        found = {"rule": self.rule, "message": self.message}
        return found | {"fieldPath": self.field_path} if self.field_path else found


def rules(*listed: Rule) -> dict[str, Any]:
    return {"x-kubernetes-validations": [rule.as_dict() for rule in listed]}


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
    def _nulls_are_absent(cls, value: object) -> object:
        if isinstance(value, Mapping):
            return {key: item for key, item in value.items() if item is not None}
        return value

    def to_wire(self) -> dict[str, Any]:
        """camelCase, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Report(Model):
    """A status part: unknown fields are ignored, because another release may have written it."""

    model_config = ConfigDict(extra="ignore")


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
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []
    owner_references: list[OwnerReference] = []
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
