"""Settings of `loraplane-gateway registry`: environment variables with the prefix LORAPLANE_, or flags."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from loraplane_core.credentials import read_key
from loraplane_gateway.db.engine import driver_url
from loraplane_gateway.urls import REDIS_FORM, REDIS_SCHEMES, check_url

Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
ADMIN_KEY_MIN = 32


class RegistrySettings(BaseSettings):
    """Read once at start, frozen; a bad value stops the start."""

    model_config = SettingsConfigDict(env_prefix="LORAPLANE_", frozen=True, extra="ignore", hide_input_in_errors=True)

    database_url: SecretStr = Field(description="postgresql:// URL of the role loraplane_registry")
    redis_url: SecretStr | None = Field(
        None, description="redis:// URL for revocation notices; without it data gateways poll"
    )
    master_key_file: Path = Field(description="hexadecimal master key; operator and fetch credentials derive from it")
    key_pepper_file: Path = Field(description="hexadecimal pepper of the API keys, shared with the data gateways")
    admin_key_file: Path = Field(description="the platform's admin key, as text")
    admin_host: str = Field("127.0.0.1", description="address of the admin listener")
    admin_port: Port = Field(8001, description="0 takes a free one, see ports_file")
    artifact_host: str = Field("127.0.0.1", description="address of the artifact listener")
    artifact_port: Port = Field(8002, description="0 takes a free one, see ports_file")
    ports_file: Path | None = Field(None, description="JSON {admin, artifact} of the real ports, once listening")
    adapter_root: Path = Field(description="`file:` sources lie below it, and hand-written paths too")
    store_dir: Path = Field(description="the artifact store, with its staging and uploads")
    workers: int = Field(1, ge=1, le=64, description="ingestion worker processes")
    ingest_timeout: Annotated[float, Field(ge=1, le=3600)] = Field(
        120, description="one ingestion, then its worker is ended"
    )
    ingest_attempts: int = Field(3, ge=1, le=10, description="tries of an ingestion whose worker is lost")
    max_artifact: int = Field(2 << 30, ge=1 << 10, description="largest weights file in bytes")
    max_body: int = Field(4 << 20, ge=1 << 10, description="largest JSON body in bytes")
    upload_ttl: Seconds = Field(86_400, description="an upload is removed after this")
    max_uploads: int = Field(16, ge=1, description="open uploads of one tenant")
    feed_keep: int = Field(100_000, ge=10, description="changes kept for readers that come back with a cursor")
    drain_timeout: Seconds = Field(10, description="for running requests at shutdown")

    @field_validator("database_url")
    @classmethod
    def _is_postgres(cls, value: SecretStr) -> SecretStr:
        driver_url(value.get_secret_value())
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_url(value.get_secret_value(), REDIS_SCHEMES, REDIS_FORM)
        return value

    @field_validator("adapter_root")
    @classmethod
    def _is_folder(cls, value: Path) -> Path:
        if not value.is_dir():
            raise ValueError(f"{value} is not a folder")
        return value.resolve()

    @model_validator(mode="after")
    def _keys_are_readable(self) -> Self:
        read_secrets(self)
        return self


@dataclass(frozen=True, slots=True)
class RegistrySecrets:
    master: bytes = field(repr=False)
    pepper: bytes = field(repr=False)
    admin_key: str = field(repr=False)


def read_secrets(settings: RegistrySettings) -> RegistrySecrets:
    """The contents of the key files. Raises ValueError on one that is missing, short or used twice."""
    master, pepper = read_key(settings.master_key_file), read_key(settings.key_pepper_file)
    if master == pepper:
        raise ValueError("master_key_file and key_pepper_file hold the same key; each has its own use")
    try:
        admin_key = settings.admin_key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{settings.admin_key_file} holds no admin key: {error}") from error
    if len(admin_key) < ADMIN_KEY_MIN:
        raise ValueError(f"the admin key has {len(admin_key)} characters; it needs at least {ADMIN_KEY_MIN}")
    return RegistrySecrets(master, pepper, admin_key)
