"""What the `loraplane` command itself can refuse, beside what a gateway answered (core errors).

LocalError ── AlreadyRunning, NotRunning, StartFailed, BadDocument, NotConfigured
"""

from loraplane_core.errors import LoraplaneError


class LocalError(LoraplaneError):
    """A refusal of this machine's own tools; `exit_code` is the command's."""

    code = "local_error"
    exit_code = 1


class AlreadyRunning(LocalError):
    code = "already_running"
    exit_code = 3


class NotRunning(LocalError):
    code = "not_running"
    exit_code = 4


class StartFailed(LocalError):
    """A part did not come up, or gave up; the message ends with what to read."""

    code = "start_failed"
    exit_code = 5


class BadDocument(LocalError):
    code = "bad_document"
    exit_code = 6


class NotConfigured(LocalError):
    """Neither the environment nor `.loraplane/env` says where the gateway is."""

    code = "not_configured"
    exit_code = 4
