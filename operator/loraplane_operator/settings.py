"""What one operator process is told, from the command line; wrong values stop the start."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Common:
    registry_url: str  # the registry's admin listener
    artifacts_url: str  # the artifact listener, as engines reach it
    master_key_file: Path
    host: str  # of the health and metrics port
    port: int  # 0: any free one, told in the log

    def __post_init__(self) -> None:
        for name in ("registry_url", "artifacts_url"):
            if not getattr(self, name).startswith(("http://", "https://")):
                raise ValueError(f"--{name.replace('_', '-')} must be an http or https URL")


@dataclass(frozen=True)
class Local(Common):
    folder: Path  # of YAML documents
    state_dir: Path
    supervisor_socket: Path
    model_root: Path  # file: bases lie below it


@dataclass(frozen=True)
class Kubernetes(Common):
    namespaces: tuple[str, ...]  # where objects are honoured
    engine_image: str
    model_claim: str  # the claim mounted as the model root
    pod_template_allowed: frozenset[str] = frozenset()  # what pools may set beyond the restricted rules
    pool_namespaces: tuple[str, ...] = ()  # where pools are honoured, some of `namespaces`; none named: all of them
    image_pull_secrets: tuple[str, ...] = ()  # by name, in the namespaces of pools
    home: str = ""  # the namespace that it runs in; "": in none

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.pool_namespaces:
            if name not in self.namespaces:
                raise ValueError(f"--pool-namespace {name}: not among the --namespace")
