"""Settings of `loraplane-gateway data`: environment variables with the prefix LORAPLANE_."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from loraplane_core.credentials import read_key
from loraplane_core.identity import is_name
from loraplane_gateway.db.engine import driver_url
from loraplane_gateway.urls import REDIS_FORM, REDIS_SCHEMES, check_url

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class DataSettings(BaseSettings):
    """Read once at start, frozen; a bad value stops the start."""

    model_config = SettingsConfigDict(env_prefix="LORAPLANE_", frozen=True, extra="ignore", hide_input_in_errors=True)

    database_url: SecretStr = Field(description="postgresql:// URL of the role `data`")
    redis_url: SecretStr | None = Field(None, description="redis:// URL; without it loads are this process's own")
    key_pepper_file: Path = Field(description="hexadecimal pepper of the API keys, shared with the registry")
    data_key_file: Path = Field(description="hexadecimal role key `data`: engine credentials derive from it")
    state_key_file: Path = Field(description="hexadecimal role key `state`")
    endpoints_dir: Path | None = Field(None, description="folder of EndpointSlice-shaped JSON files")
    endpoints_namespaces: str | None = Field(
        None, description="in a pod, instead: namespaces, by comma, whose EndpointSlices are watched"
    )
    host: str = Field("127.0.0.1", description="address of the OpenAI port")
    port: int = Field(8000, ge=0, le=65_535, description="0 takes a free one, see ports_file")
    metrics_port: int | None = Field(None, ge=0, le=65_535, description="Prometheus listener; unset: none")
    ports_file: Path | None = Field(None, description="JSON of the real ports, written atomically once listening")
    max_body: int = Field(4 << 20, ge=1024, description="largest request body in bytes; more is 413")
    max_response: int = Field(64 << 20, ge=1024, description="largest unstreamed answer of an engine in bytes")
    max_in_flight: int = Field(1024, ge=1, le=100_000, description="requests in this process at once; more is 429")
    body_timeout: Seconds = Field(30, description="for a client to send its body")
    connect_timeout: Seconds = Field(2, description="for a connection to an engine")
    silence_timeout: Seconds = Field(300, description="longest silence of an engine, before or between bytes")
    request_timeout: Seconds = Field(1800, description="a whole request")
    route_timeout: Seconds = Field(3, description="how long a request waits for a routable replica")
    lost_timeout: Seconds = Field(10, description="requests on a replica out of step for longer are given up")
    retries: int = Field(2, ge=0, le=10, description="further replicas tried before the first byte")
    target_in_flight: int = Field(16, ge=1, description="requests of one adapter on one replica before it spreads")
    key_ttl: Annotated[float, Field(gt=0, le=30)] = Field(20, description="a key is looked up again after this")
    snapshot_limit: Seconds = Field(900, description="how long the last good registry snapshot serves without Postgres")
    drain_timeout: Seconds = Field(20, description="for running requests at shutdown")
    linger: Annotated[float, Field(ge=0, le=600)] = Field(
        0, description="after SIGTERM new requests are taken for so long; each answer then ends its connection"
    )

    @field_validator("database_url", "redis_url", "key_pepper_file", "data_key_file", "state_key_file", "endpoints_dir")
    @classmethod
    def _not_blank(cls, value: SecretStr | Path | None) -> SecretStr | Path | None:
        text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        if not text.strip():
            raise ValueError("must not be empty")
        return value

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

    @model_validator(mode="after")
    def _endpoints_come_from_one_place(self) -> Self:
        if (self.endpoints_dir is None) == (self.endpoints_namespaces is None):
            raise ValueError("set either endpoints_dir or endpoints_namespaces")
        if self.endpoints_namespaces is not None and not all(is_name(name) for name in self.watched_namespaces):
            raise ValueError("endpoints_namespaces must be names of namespaces, separated by commas")
        return self

    @property
    def watched_namespaces(self) -> tuple[str, ...]:
        return tuple((self.endpoints_namespaces or "").split(","))

    @model_validator(mode="after")
    def _keys_are_readable(self) -> Self:
        for file in (self.key_pepper_file, self.data_key_file, self.state_key_file):
            read_key(file)
        if read_key(self.data_key_file) == read_key(self.state_key_file):
            raise ValueError("data_key_file and state_key_file hold the same key; each role has its own")
        return self
