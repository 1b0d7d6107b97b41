"""What every repository here is built from: a session and the scope its statements are filtered by."""

import datetime

from loraplane_gateway.db.sessions import Scope, Session


class Repository:
    """Base of all repositories. SQL that names a tenant takes it from `self.tenant` and from nowhere else."""

    def __init__(self, session: Session, scope: Scope) -> None:
        self.session = session
        self.scope = scope

    @property
    def tenant(self) -> str:
        if self.scope.tenant is None:
            raise ValueError("this statement needs the scope of one tenant")
        return self.scope.tenant

    @property
    def binds(self) -> dict[str, object]:
        """For statements that serve both scopes: `(:tenant = '' OR tenant_id = :tenant)`."""
        return {"tenant": self.scope.tenant or ""}


def rfc3339(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
