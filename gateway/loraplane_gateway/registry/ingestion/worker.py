"""One ingestion, as it runs in a worker process: copy, check, digest, store. Knows files only, no database."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplane_core.artifact.preflight import Limits, base_evidence, preflight
from loraplane_core.errors import LoraplaneError
from loraplane_gateway.registry.artifacts.store import ArtifactStore
from loraplane_gateway.registry.ingestion.sources import copy_artifact


@dataclass(frozen=True, slots=True)
class IngestJob:
    """`path` is taken below `root`. An expectation that is None is not checked."""

    root: Path
    path: Path
    store: Path
    base_model: str
    aliases: tuple[str, ...]
    base_config: dict[str, Any]
    max_rank: int
    max_bytes: int
    expected_digest: str | None = None
    expected_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    digest: str
    bytes: int
    rank: int
    target_modules: tuple[str, ...]
    base_evidence: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The artifact breaks a rule; trying again gives the same answer."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The work could not be done; another try may succeed."""

    code: str
    message: str


Outcome = Accepted | Refused | Failed


def ingest(job: IngestJob) -> Outcome:
    store = ArtifactStore(job.store)
    staged = store.stage()
    try:
        return _ingest(job, store, staged)
    except LoraplaneError as error:
        return Refused(error.code, error.message)
    except OSError as error:
        # strerror, not the exception: that would name paths of this machine.
        return Failed("source_unavailable", f"the source or the store cannot be used: {os.strerror(error.errno or 0)}")
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _ingest(job: IngestJob, store: ArtifactStore, staged: Path) -> Outcome:
    limits = Limits(max_bytes=job.max_bytes, max_rank=job.max_rank)
    copy_artifact(job.root, job.path, staged, limits)
    base_names = (job.base_model, *job.aliases)
    report = preflight(staged, base_config=job.base_config, limits=limits, base_names=base_names)
    evidence = base_evidence(report.base_name, base_names)
    if job.expected_digest is not None and report.digest != job.expected_digest:
        return Refused("digest_mismatch", f"the bytes have the digest {report.digest}, not the one declared")
    if job.expected_rank is not None and report.rank != job.expected_rank:
        return Refused("rank_mismatch", f"the artifact has rank {report.rank}, not {job.expected_rank} as declared")
    store.publish(staged, report.digest)
    modules = tuple(report.target_modules)
    return Accepted(report.digest, report.bytes, report.rank, modules, evidence, report.parameters)
