"""`loraplane-gateway registry | data | migrate | role-keys`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loraplane_core.version import VERSION

OWNER_URL = "LORAPLANE_OWNER_URL"
#: Registry settings that are also flags; all of them are also environment variables (settings.py).
_FLAGS = (
    "admin-host",
    "admin-port",
    "artifact-host",
    "artifact-port",
    "ports-file",
    "adapter-root",
    "store-dir",
    "workers",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loraplane-gateway", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data", help="the OpenAI port; settings from LORAPLANE_* variables")
    registry = commands.add_parser("registry", help="admin and artifact listeners, ingestion workers")
    for flag in _FLAGS:
        registry.add_argument(f"--{flag}", help=f"as LORAPLANE_{flag.upper().replace('-', '_')}")
    migrate = commands.add_parser("migrate", help="bring the database to this release's schema, as its owner")
    migrate.add_argument("--owner-url", help=f"postgresql:// URL of the owner; better from ${OWNER_URL} or a file")
    migrate.add_argument("--owner-url-file", type=Path, help="a file with that URL")
    migrate.add_argument(
        "--create-roles", action="store_true", help="make the two service roles or renew their passwords"
    )
    migrate.add_argument("--registry-password-file", type=Path)
    migrate.add_argument(
        "--wait", type=float, default=0, metavar="SECONDS", help="for a database that does not answer yet; default: 0"
    )
    migrate.add_argument("--data-password-file", type=Path)
    roles = commands.add_parser(
        "role-keys", help="derive what a data gateway may hold, and nothing more, of the master"
    )
    roles.add_argument("--master-key-file", type=Path, required=True)
    roles.add_argument("--into", type=Path, required=True, help="folder for data.key and state.key")
    return parser


def _migrate(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import psycopg
    from sqlalchemy.exc import DBAPIError

    from loraplane_core.errors import Unavailable
    from loraplane_gateway.db.migrate import migrate
    from loraplane_gateway.db.roles import create_roles
    from loraplane_gateway.db.wait import until_it_answers

    owner_url = arguments.owner_url or os.environ.get(OWNER_URL)
    if arguments.owner_url_file is not None:
        owner_url = arguments.owner_url_file.read_text().strip()
    if not owner_url:
        parser.error(f"migrate needs --owner-url, --owner-url-file or ${OWNER_URL}")
    if arguments.create_roles and (arguments.registry_password_file is None or arguments.data_password_file is None):
        parser.error("--create-roles needs --registry-password-file and --data-password-file")
    try:
        until_it_answers(owner_url, arguments.wait)
        if arguments.create_roles:
            create_roles(
                owner_url,
                registry_password=_password(arguments.registry_password_file),
                data_password=_password(arguments.data_password_file),
            )
        migrate(owner_url)
    except ValueError as error:
        return _refused("migrate", str(error))
    except (Unavailable, psycopg.Error, DBAPIError) as error:
        return _refused("migrate", str(getattr(error, "orig", error)), status=1)
    return 0


def _password(file: Path) -> str:
    """Postgres would take an empty one, and let nobody in with it."""
    if found := file.read_text().strip():
        return found
    raise ValueError(f"{file} holds no password")


def _refused(command: str, why: str, status: int = 2) -> int:
    print(f"loraplane-gateway {command}: {why}", file=sys.stderr)  # noqa: T201
    return status


def _registry(arguments: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from loraplane_gateway.problems import problems
    from loraplane_gateway.registry.main import run
    from loraplane_gateway.secret_files import secret_files
    from loraplane_gateway.settings import RegistrySettings

    names = [flag.replace("-", "_") for flag in _FLAGS]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    try:
        settings = RegistrySettings(**secret_files(), **given)
    except ValidationError as error:
        for problem in problems(error):
            _refused("registry", problem)
        return 2
    return run(settings)


def _role_keys(arguments: argparse.Namespace) -> int:
    from loraplane_core.credentials import read_key, role_key

    try:
        master = read_key(arguments.master_key_file)
    except ValueError as error:
        return _refused("role-keys", str(error))
    for role in ("data", "state"):
        file = arguments.into / f"{role}.key"
        file.touch(mode=0o600)
        file.write_text(role_key(master, role).hex())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "migrate":
        return _migrate(arguments, parser)
    if arguments.command == "role-keys":
        return _role_keys(arguments)
    if arguments.command == "registry":
        return _registry(arguments)
    from loraplane_gateway.data.main import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
