"""Tenant: a document that only the CLI reads; no such kind exists on the API server (design §3)."""

from typing import Literal

from pydantic import Field

from loraplane_core.resources.base import Model, Name, ObjectMeta


class TenantDocumentSpec(Model):
    namespaces: list[Name] = Field(default=[], max_length=256)
    """Namespaces whose LoRAAdapters may claim for the tenant."""


class Tenant(Model):
    api_version: Literal["loraplane.dev/v1alpha1"] = "loraplane.dev/v1alpha1"
    kind: Literal["Tenant"] = "Tenant"
    metadata: ObjectMeta
    spec: TenantDocumentSpec = TenantDocumentSpec()
