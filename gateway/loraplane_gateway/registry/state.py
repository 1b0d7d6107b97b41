"""What the process holds while it runs; built once in main.py and handed down."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from loraplane_gateway.db.sessions import Sessions
from loraplane_gateway.registry.artifacts.store import ArtifactStore
from loraplane_gateway.registry.auth import Authenticator
from loraplane_gateway.registry.feed.hub import Hub
from loraplane_gateway.registry.metrics import Metrics
from loraplane_gateway.registry.revocations import Revocations
from loraplane_gateway.registry.signals import Signal
from loraplane_gateway.registry.uploads.files import UploadFiles
from loraplane_gateway.settings import RegistrySecrets, RegistrySettings


@dataclass(slots=True)
class RegistryState:
    settings: RegistrySettings
    secrets: RegistrySecrets
    engine: AsyncEngine
    sessions: Sessions
    authenticator: Authenticator
    hub: Hub
    store: ArtifactStore
    uploads: UploadFiles
    revocations: Revocations
    metrics: Metrics
    #: Something may have come to the ingestion queue; the dispatcher also looks by itself, but not at once.
    queued: Signal
    feed_readers: int = 0
