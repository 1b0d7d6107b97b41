"""The databases' start scripts, with stand-ins for the servers; real ones start in tests/cluster/node."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.images.recipes import ROOT

PASSWORD = "a-password"
# Each writes down its arguments, environment and input.
RECORD = 'name=${0##*/}; echo "$*" >>"$CALLS/$name"; env >"$CALLS/$name.env"\n'
INITDB = """
for word; do case $word in --pgdata=*) folder=${word#--pgdata=} ;; esac; done
mkdir "$folder" && touch "$folder/pg_hba.conf"
[ -z "$BREAKS" ] || exit 1
echo 17 >"$folder/PG_VERSION"
"""
SERVER = 'cat >"$CALLS/$name.input"\n'
CLIENT = f'{SERVER}printf "$ANSWERS"\n'


class Container:
    def __init__(self, folder: Path) -> None:
        self.calls, self.data, self.secret = folder / "calls", folder / "data", folder / "password"
        self._bin = folder / "bin"
        for made in (self.calls, self.data, self._bin):
            made.mkdir()
        self.secret.write_text(f"{PASSWORD}\n")
        programs = {"initdb": INITDB, "postgres": SERVER, "valkey-server": SERVER, "valkey-cli": CLIENT}
        for name, body in programs.items():
            (self._bin / name).write_text(f"#!/bin/sh\n{RECORD}{body}")
            (self._bin / name).chmod(0o755)

    def start(self, image: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(image, "start", *arguments, **environment)

    def run(self, image: str, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"PATH": f"{self._bin}:/usr/bin:/bin", "CALLS": str(self.calls), "BREAKS": ""}
        own["PGDATA"] = str(self.data / "postgres")
        return subprocess.run(
            [ROOT / "images" / image / script, *arguments],
            env={**own, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    def of(self, name: str) -> list[str]:
        """The arguments of each call."""
        file = self.calls / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_postgres_makes_the_database_at_the_first_start_only(container: Container) -> None:
    first = container.start("postgres", "-c", "max_connections=50", POSTGRES_PASSWORD_FILE=str(container.secret))
    assert (first.returncode, first.stderr) == (0, "")
    assert "--username=loraplane" in container.of("initdb")[0]
    made, served = container.of("postgres")
    assert made.startswith("--single")
    assert served.startswith(f"-D {container.data}/postgres ")
    assert served.endswith("-c max_connections=50")
    assert container.start("postgres").returncode == 0
    assert len(container.of("initdb")) == 1
    assert len(container.of("postgres")) == 3


def test_postgres_asks_everyone_outside_of_its_pod_for_the_password(container: Container) -> None:
    container.start("postgres", POSTGRES_PASSWORD_FILE=str(container.secret))
    assert "--auth-host=scram-sha-256" in container.of("initdb")[0]
    rules = (container.data / "postgres" / "pg_hba.conf").read_text()
    assert rules == "host all all all scram-sha-256\n"
    assert PASSWORD not in "".join(file.read_text() for file in container.calls.iterdir())


def test_postgres_starts_anew_after_an_interrupted_first_start(container: Container) -> None:
    broken = container.start("postgres", POSTGRES_PASSWORD_FILE=str(container.secret), BREAKS="yes")
    assert broken.returncode == 1
    assert container.of("postgres") == []
    assert container.start("postgres", POSTGRES_PASSWORD_FILE=str(container.secret)).returncode == 0
    assert [path.name for path in container.data.iterdir()] == ["postgres"]


def test_postgres_closes_its_folder_which_a_mount_opened_to_the_group(container: Container) -> None:
    container.start("postgres", POSTGRES_PASSWORD_FILE=str(container.secret))
    (container.data / "postgres").chmod(0o2770)
    container.start("postgres")
    assert (container.data / "postgres").stat().st_mode & 0o7777 in (0o700, 0o2700)


def test_postgres_without_a_password_does_not_start(container: Container) -> None:
    refused = container.start("postgres")
    assert refused.returncode != 0
    assert "the file that holds the password of loraplane" in refused.stderr
    assert list(container.data.iterdir()) == []


def test_valkey_gets_its_password_where_nobody_else_reads_it(container: Container) -> None:
    done = container.start("valkey", "--maxmemory", "64mb", VALKEY_PASSWORD_FILE=str(container.secret))
    assert (done.returncode, done.stderr) == (0, "")
    (arguments,) = container.of("valkey-server")
    assert arguments.startswith("- --port 6379 ")
    assert arguments.endswith("--maxmemory 64mb")
    assert (container.calls / "valkey-server.input").read_text() == f"requirepass {PASSWORD}\n"
    assert PASSWORD not in arguments + (container.calls / "valkey-server.env").read_text()


@pytest.mark.parametrize("password", ["", "two words", "a\nrename-command X", 'quote"'])
def test_valkey_refuses_a_password_that_its_configuration_would_not_hold(container: Container, password: str) -> None:
    container.secret.write_text(password)
    refused = container.start("valkey", VALKEY_PASSWORD_FILE=str(container.secret))
    assert refused.returncode == 2
    assert refused.stderr == "the password must be letters, digits and . _ ~ + / = -\n"
    assert container.of("valkey-server") == []


@pytest.mark.parametrize(
    ("answers", "status"),
    [("OK\\n\\nPONG\\n", 0), ("OK\\nPONG\\n", 0), ("WRONGPASS\\nNOAUTH\\n", 1), ("OK\\nLOADING\\n", 1), ("", 1)],
)
def test_the_probe_of_valkey_shows_its_password_to_nobody(container: Container, answers: str, status: int) -> None:
    done = container.run("valkey", "probe", VALKEY_PASSWORD_FILE=str(container.secret), ANSWERS=answers)
    assert done.returncode == status
    assert (container.calls / "valkey-cli.input").read_text() == f"AUTH {PASSWORD}\nPING\n"
    seen = "".join([*container.of("valkey-cli"), (container.calls / "valkey-cli.env").read_text()])
    assert PASSWORD not in seen + done.stdout + done.stderr


def test_the_scripts_are_plain_shell() -> None:
    """What the images have is Debian's sh, not bash."""
    shell = shutil.which("dash") or "/bin/sh"
    for script in [*(ROOT / "images").glob("*/start"), ROOT / "images" / "valkey" / "probe"]:
        subprocess.run([shell, "-n", script], check=True, timeout=10)
        assert os.access(script, os.X_OK)
