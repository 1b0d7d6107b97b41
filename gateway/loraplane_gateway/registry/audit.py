"""The audit log: who did what to which ids. Never a secret, a path or tenant content."""

from sqlalchemy import text

from loraplane_gateway.registry.rows import Repository

_ADD = text("""
    INSERT INTO audit_log (actor, action, tenant_id, subject, version, from_version, detail)
    VALUES (:actor, :action, :tenant, :subject, :version, :from_version, :detail)""")


class AuditRepository(Repository):
    async def add(
        self,
        actor: str,
        action: str,
        *,
        tenant: str = "",
        subject: str = "",
        version: int | None = None,
        from_version: int | None = None,
        detail: str = "",
    ) -> None:
        """`tenant` is the subject's; row-level security refuses one outside the scope."""
        await self.session.execute(
            _ADD,
            {
                "actor": actor,
                "action": action,
                "tenant": tenant,
                "subject": subject,
                "version": version,
                "from_version": from_version,
                "detail": detail,
            },
        )
