"""Settings that are secrets, as files: a URL with a password is then in no environment and in no manifest."""

import os
from typing import Any

#: A folder (a mounted Secret) in which each file is a setting, named like its variable. Variables win over files.
SECRETS_DIR = "LORAPLANE_SECRETS_DIR"


def secret_files() -> dict[str, Any]:
    """What a settings class is to be given so that it reads that folder, too."""
    folder = os.environ.get(SECRETS_DIR)
    return {"_secrets_dir": folder} if folder else {}
