"""One release: what every process and CLI says is what the package and the chart are called."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import loraplane_cli.__main__
import loraplane_engine.settings
import loraplane_gateway.__main__
import loraplane_operator.__main__
from loraplane_core.version import VERSION

ROOT = Path(__file__).parents[2]


def test_package_and_chart_are_of_this_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "charts" / "loraplane" / "Chart.yaml").read_text())
    assert {project["version"], chart["version"], chart["appVersion"]} == {VERSION}


@pytest.mark.parametrize(
    ("name", "main"),
    [
        ("loraplane-engine", loraplane_engine.settings.parse),
        ("loraplane-gateway", loraplane_gateway.__main__.main),
        ("loraplane-operator", loraplane_operator.__main__.main),
    ],
)
def test_a_process_tells_its_release(
    name: str, main: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{name} {VERSION}\n"


def test_the_command_tells_its_release(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["loraplane", "--version"])
    with pytest.raises(SystemExit) as ended:
        loraplane_cli.__main__.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"loraplane {VERSION}\n"
