"""The one settings object of `loraplane-engine`, read from its command line and frozen.

Two forms: standalone (no credentials, loopback only, adapters named on the command line) and managed
(a credentials file; adapters come by digest from the artifact listener). Bad or insecure values stop
the start with exit status 2.
"""

import argparse
import ipaddress
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from loraplane_core import wire
from loraplane_core.errors import LoraplaneError
from loraplane_core.identity import ReplicaId, is_name
from loraplane_core.version import VERSION
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_engine.options import CoreOptions

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)?")


class SettingsError(Exception):
    """A value that must stop the start; the text is for the person at the command line."""


@dataclass(frozen=True)
class LocalAdapter:
    """`--adapter NAME=DIR`: operator's input at start, never a request's."""

    name: str
    folder: Path


@dataclass(frozen=True)
class Managed:
    credentials: EngineCredentials
    replica: ReplicaId
    artifacts_url: str  # without a trailing slash


@dataclass(frozen=True)
class Settings:
    model: Path
    served_name: str
    host: str
    port: int
    admin_port: int | None  # None = not served
    metrics_port: int | None
    ports_file: Path | None
    managed: Managed | None
    adapters: tuple[LocalAdapter, ...]
    core: CoreOptions
    cache_dir: Path | None  # None = a temporary folder that goes with the process
    disk_cache: int  # bytes of engine images kept on disk
    max_body: int  # bytes of one request
    drain_seconds: float
    start_seconds: float  # until the core must have loaded the base
    log_level: str


def parse_quantity(text: str) -> int:
    """`64Mi`, `1.5Gi`, `1000000` -> bytes."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{text!r} is not a quantity such as 64Mi or 2Gi")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse(argv: list[str]) -> Settings:
    """Settings from the command line. Exits with status 2 on a bad or insecure value."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return _settings(options)
    except SettingsError as error:
        _refuse(parser, str(error))


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    parser.error(message)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loraplane-engine",
        description="Serve one base model and many LoRA adapters over an OpenAI-compatible API.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {VERSION}")
    add("--model", required=True, metavar="DIR", help="folder of the base: config.json, *.safetensors, tokenizer")
    add("--served-name", metavar="NAME", help="the base's `model` name (default: the folder's name)")
    add("--adapter", action="append", default=[], metavar="NAME=DIR", help="standalone: serve this adapter as NAME")
    add("--host", default="127.0.0.1", help="address of all ports; anything but loopback needs --credentials")
    add("--port", type=int, default=8000, help="the OpenAI port; 0 = any free one")
    add("--admin-port", type=int, help="managed: adapters, /state, model config")
    add("--metrics-port", type=int, help="/metrics and /health without credentials")
    add("--ports-file", metavar="FILE", help="write the ports in use here as JSON")
    add("--credentials", metavar="FILE", help="managed: accepted tokens as JSON, readable by the owner only")
    add("--replica", metavar="NAMESPACE/POOL/ORDINAL", help="managed: this engine's id")
    add("--artifacts-url", metavar="URL", help="managed: the registry's artifact listener")
    add("--cache-dir", metavar="DIR", help="where engine images are kept (managed: required)")
    add("--disk-cache", default="4Gi", metavar="BYTES", help="bound of the images in --cache-dir")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--max-model-len", type=int, help="longest prompt plus answer, in tokens (default: what base and memory allow)")
    add("--max-batch-tokens", type=int, default=512, help="positions computed in one step")
    add("--max-sequences", type=int, default=64, help="requests running at once")
    add("--device-memory", metavar="BYTES", help="KV cache and adapters together")
    add("--adapter-memory", metavar="BYTES", help="the most that adapters may take of it")
    add("--host-cache", default="256Mi", metavar="BYTES", help="engine images kept in host memory")
    add("--slots", type=int, help="cap on adapters on the device at once (default: bytes decide)")
    add("--max-rank", type=int, default=256)
    add("--threads", type=int, help="compute threads (default: the CPUs this process may use)")
    add("--max-body", default="4Mi", metavar="BYTES", help="largest request body")
    add("--drain-seconds", type=float, default=10.0, help="how long SIGTERM waits for running requests")
    add("--start-seconds", type=float, default=600.0, help="how long the base may take to load")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    model = Path(options.model)
    if not (model / "config.json").is_file():
        raise SettingsError(f"--model {options.model}: no config.json there")
    served_name = options.served_name or model.resolve().name
    managed = _managed(options)
    adapters = tuple(_local_adapter(text) for text in options.adapter)
    _check_adapters(adapters, served_name, managed)
    if managed is None and not _is_loopback(options.host):
        raise SettingsError(
            f"--host {options.host} is not a loopback address and there is no --credentials file: "
            "the engine would serve anyone; give credentials or bind 127.0.0.1"
        )
    return Settings(
        model=model,
        served_name=served_name,
        host=options.host,
        port=options.port,
        admin_port=(options.admin_port or 0) if managed else None,
        metrics_port=(options.metrics_port or 0) if managed else options.metrics_port,
        ports_file=Path(options.ports_file) if options.ports_file else None,
        managed=managed,
        adapters=adapters,
        core=_core_options(options, model),
        cache_dir=Path(options.cache_dir) if options.cache_dir else None,
        disk_cache=parse_quantity(options.disk_cache),
        max_body=parse_quantity(options.max_body),
        drain_seconds=options.drain_seconds,
        start_seconds=options.start_seconds,
        log_level=options.log_level,
    )


def _core_options(options: argparse.Namespace, model: Path) -> CoreOptions:
    for name in ("max_model_len", "max_batch_tokens", "max_sequences", "slots", "max_rank", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} must be at least 1")
    return CoreOptions(
        model=str(model.resolve()),
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
        device_memory=parse_quantity(options.device_memory) if options.device_memory else None,
        adapter_memory=parse_quantity(options.adapter_memory) if options.adapter_memory else None,
        host_cache=parse_quantity(options.host_cache),
        slots=options.slots,
        max_rank=options.max_rank,
        threads=options.threads,
    )


def _managed(options: argparse.Namespace) -> Managed | None:
    if options.credentials is None:
        for name in ("replica", "artifacts_url", "admin_port"):
            if getattr(options, name) is not None:
                raise SettingsError(f"--{name.replace('_', '-')} needs --credentials")
        return None
    for name in ("replica", "artifacts_url", "cache_dir"):
        if getattr(options, name) is None:
            raise SettingsError(f"--credentials needs --{name.replace('_', '-')} too")
    if not re.match(r"https?://", options.artifacts_url):
        raise SettingsError("--artifacts-url must be an http:// or https:// URL")
    try:
        replica = ReplicaId.parse(options.replica)
    except LoraplaneError as error:
        raise SettingsError(f"--replica: {error.message}") from error
    return Managed(_read_credentials(Path(options.credentials)), replica, options.artifacts_url.rstrip("/"))


def _read_credentials(path: Path) -> EngineCredentials:
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"--credentials {path}: {error.strerror}") from error
    # Group access stays allowed: Kubernetes mounts a Secret with the pod's fsGroup on it.
    if mode & stat.S_IRWXO:
        raise SettingsError(f"--credentials {path} may be read by everyone (mode {stat.S_IMODE(mode):o}); make it 0600")
    try:
        credentials = wire.decode(content, EngineCredentials)
    except LoraplaneError as error:
        raise SettingsError(f"--credentials {path}: {error.message}") from error
    if not all([*credentials.data, *credentials.state, *credentials.admin, credentials.fetch]) or not credentials.data:
        raise SettingsError(f"--credentials {path} holds an empty token")
    return credentials


def _local_adapter(text: str) -> LocalAdapter:
    name, equals, folder = text.partition("=")
    if not equals or not is_name(name):
        raise SettingsError(f"--adapter {text!r}: give NAME=DIR, NAME a DNS label (lower case, digits, '-')")
    if not Path(folder).is_dir():
        raise SettingsError(f"--adapter {name}: {folder} is not a folder")
    return LocalAdapter(name, Path(folder))


def _check_adapters(adapters: tuple[LocalAdapter, ...], served_name: str, managed: Managed | None) -> None:
    if managed is not None and adapters:
        raise SettingsError("--adapter is for the standalone form; a managed engine gets adapters from its operator")
    names = [adapter.name for adapter in adapters]
    for name in names:
        if name == served_name:
            raise SettingsError(f"--adapter {name}: the base model has this name; a request could not tell them apart")
        if names.count(name) > 1:
            raise SettingsError(f"--adapter {name} is given twice")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
