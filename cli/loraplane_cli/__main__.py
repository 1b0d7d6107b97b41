"""`loraplane`: runs a command; a refusal becomes one line (or one JSON object) and an exit status."""

import sys

from loraplane_cli.app import app
from loraplane_cli.output import fail
from loraplane_core.errors import LoraplaneError


def main() -> None:
    try:
        app()
    except LoraplaneError as error:
        sys.exit(fail(error, as_json="--json" in sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
