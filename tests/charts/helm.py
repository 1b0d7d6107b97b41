"""Runs helm, as the cluster tool built it from tests/cluster/go/helm; renders the chart."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.tool.build import cached

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "loraplane"
VALUES = Path(__file__).parent / "values"
GOLDEN = Path(__file__).parent / "golden"
#: The sets of values that are rendered: the shipped ones, and what else people may set.
SETS = {file.stem: file for folder in (CHART / "values", VALUES) for file in sorted(folder.glob("*.yaml"))}
RELEASE, NAMESPACE = "loraplane", "lp-chart"
KUBERNETES = "1.36.0"
NOT_BUILT = "helm is not built: `make check-cluster` builds it, and runs this then"
#: What is made at random comes as one of these; everything else is the same at every rendering.
_MADE = re.compile(r"^(  [a-z][a-z.-]*: )[A-Za-z0-9+/=]{40,}$", re.MULTILINE)
_SECONDS = 60


class HelmFailed(Exception):
    """helm's own words."""


def binary() -> Path:
    """Skips the test that asks when helm is not there."""
    found = cached("helm")
    if found is None:
        pytest.skip(NOT_BUILT)
    return found


def helm(*arguments: str, env: dict[str, str] | None = None, seconds: int = _SECONDS) -> str:
    """What helm prints. Raises HelmFailed."""
    program = binary()
    with tempfile.TemporaryDirectory() as home:
        homes = {f"HELM_{name}_HOME": f"{home}/{name.lower()}" for name in ("CACHE", "CONFIG", "DATA")}
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, **homes, **(env or {})}
        done = subprocess.run(
            [str(program), *arguments], env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    if done.returncode != 0:
        raise HelmFailed(done.stderr + done.stdout)
    return done.stdout


def template(
    *values: Path, settings: dict[str, str] | None = None, namespace: str = NAMESPACE, release: str = RELEASE
) -> str:
    """The whole rendering, hooks and the test included."""
    arguments = ["template", release, str(CHART), "--namespace", namespace, "--kube-version", KUBERNETES]
    for file in values:
        arguments += ["--values", str(file)]
    for name, value in (settings or {}).items():
        arguments += ["--set-json", f"{name}={value}"]
    return helm(*arguments)


def objects(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def masked(text: str) -> str:
    """As it is kept in golden/: without what is random."""
    return _MADE.sub(r"\1<made once>", text)


def pod_templates(rendered: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind/name: {metadata, spec} of everything that becomes a pod."""
    found = {}
    for each in rendered:
        name = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "Pod":
            found[f"{name}/{each['metadata']['namespace']}"] = {"metadata": each["metadata"], "spec": each["spec"]}
        elif each["kind"] in ("Deployment", "Job"):
            found[name] = each["spec"]["template"]
        elif each["kind"] == "StatefulSet":
            found[f"{name}/{each['metadata']['namespace']}"] = each["spec"]["template"]
    return found
