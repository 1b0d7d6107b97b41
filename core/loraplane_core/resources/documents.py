"""From parsed YAML or JSON to resource models, with errors that name the document and the field."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from loraplane_core.errors import InvalidParameter
from loraplane_core.labels import ADAPTER_KIND, API_VERSION, POOL_KIND, TENANT_KIND
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.base import IMMUTABLE
from loraplane_core.resources.pool import BaseModelPool, BaseModelSource
from loraplane_core.resources.tenant import Tenant

Resource = Tenant | BaseModelPool | LoRAAdapter
_KINDS: dict[str, type[Tenant] | type[BaseModelPool] | type[LoRAAdapter]] = {
    TENANT_KIND: Tenant,
    POOL_KIND: BaseModelPool,
    ADAPTER_KIND: LoRAAdapter,
}
_ERRORS_SHOWN = 5


def parse_documents(documents: Iterable[object]) -> list[Resource]:
    """The resources in parsed documents; empty ones (None) are passed over.

    Raises InvalidParameter for the first bad document, naming its number (from 0) and its fields.
    """
    return [
        parse_document(document, where=f"document {index}")
        for index, document in enumerate(documents)
        if document is not None
    ]


def parse_document(document: object, *, where: str = "document") -> Resource:
    """One resource; raises InvalidParameter whose `param` is the path of the (first) field at fault."""
    if not isinstance(document, Mapping):
        raise InvalidParameter(f"{where}: an object is expected", param="")
    if document.get("apiVersion") != API_VERSION:
        raise InvalidParameter(f"{where}: apiVersion must be {API_VERSION}", param="apiVersion")
    kind = document.get("kind")
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidParameter(f"{where}: kind must be one of {', '.join(_KINDS)}", param="kind")
    try:
        return model.model_validate(dict(document), by_alias=True, by_name=False)
    except ValidationError as error:
        raise _invalid(f"{where} ({_described(document)})", error) from error


def check_update(old: Resource, new: Resource) -> None:
    """Raises InvalidParameter (code `immutable_field`) when `new` changes what may not change, also from unset."""
    if isinstance(old, LoRAAdapter) and isinstance(new, LoRAAdapter):
        _unchanged("spec.tenant", old.spec.tenant, new.spec.tenant)
        _unchanged("spec.adapter", old.spec.adapter, new.spec.adapter)
        _unchanged("spec.poolRef", old.spec.pool_ref, new.spec.pool_ref)
    elif isinstance(old, BaseModelPool) and isinstance(new, BaseModelPool):
        _unchanged("spec.baseModel", _comparable(old.spec.base_model), _comparable(new.spec.base_model))
    elif type(old) is not type(new):
        _unchanged("kind", old.kind, new.kind)


def _comparable(base: BaseModelSource) -> BaseModelSource:
    """The aliases are a set: their order says nothing."""
    return base.model_copy(update={"aliases": sorted(base.aliases)})


def _unchanged(field: str, old: object, new: object) -> None:
    if old != new:
        raise InvalidParameter(
            f"{field} {IMMUTABLE}",
            param=field,
            code="immutable_field",
        )


def _invalid(where: str, error: ValidationError) -> InvalidParameter:
    found = error.errors(include_url=False, include_context=False)
    paths = [_path(item["loc"]) for item in found]
    texts = [f"{path}: {_text(item)}" for path, item in zip(paths, found, strict=True)]
    more = f"; and {len(texts) - _ERRORS_SHOWN} more" if len(texts) > _ERRORS_SHOWN else ""
    return InvalidParameter(f"{where}: {'; '.join(texts[:_ERRORS_SHOWN])}{more}", param=paths[0])


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _text(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown field"
    message: str = item["msg"]
    return message.removeprefix("Value error, ")


def _described(document: Mapping[Any, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return f"{document['kind']} {name}" if isinstance(name, str) else str(document["kind"])
