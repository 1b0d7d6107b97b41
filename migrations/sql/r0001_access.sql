-- Who may do what. The roles come from the installer (loraplane_gateway.db.roles); here they are only granted to.
-- A transaction says whose rows it means by loraplane.tenant, or loraplane.scope = 'platform' for all of them;
-- one that says nothing sees nothing.

DO $$
DECLARE
    place record;
BEGIN
    FOR place IN SELECT * FROM (VALUES
        ('tenants', 'name'), ('api_keys', 'tenant_id'), ('quotas', 'tenant_id'), ('adapters', 'tenant_id'),
        ('tenant_adapters', 'tenant_id'), ('registrations', 'tenant_id'), ('ingestions', 'tenant_id'),
        ('uploads', 'tenant_id'), ('usage_events', 'tenant_id'), ('audit_log', 'tenant_id'), ('changes', 'tenant_id')
    ) AS tenant_tables (name, tenant)
    LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', place.name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', place.name);
        EXECUTE format('CREATE POLICY owner_all ON %I TO %I USING (true) WITH CHECK (true)', place.name, current_user);
        EXECUTE format($policy$
            CREATE POLICY tenant_scope ON %I TO loraplane_registry, loraplane_data
            USING (current_setting('loraplane.scope', true) = 'platform'
                   OR %I = current_setting('loraplane.tenant', true))
            WITH CHECK (current_setting('loraplane.scope', true) = 'platform'
                   OR %I = current_setting('loraplane.tenant', true))$policy$, place.name, place.tenant, place.tenant);
    END LOOP;
END $$;

-- The data gateway's only way to a key: by the digest of a secret that it was shown.
CREATE FUNCTION loraplane_find_key(secret_digest bytea)
    RETURNS TABLE (key_id text, tenant_id text, scopes text[], expires_at timestamptz, revoked_at timestamptz)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT k.id, k.tenant_id, k.scopes,
           CASE WHEN k.digest = secret_digest THEN k.expires_at
                ELSE least(k.expires_at, k.previous_expires_at) END,
           k.revoked_at
    FROM public.api_keys k
    WHERE k.digest = secret_digest OR k.previous_digest = secret_digest
$$;

-- Functions are open to everybody by default; these two run with the owner's rights.
REVOKE ALL ON FUNCTION loraplane_find_key(bytea), loraplane_note_change(text, text, text) FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO loraplane_registry, loraplane_data;

GRANT SELECT, INSERT, UPDATE, DELETE
    ON tenants, api_keys, quotas, pools, adapters, tenant_adapters, registrations, ingestions, uploads
    TO loraplane_registry;
GRANT SELECT, INSERT ON audit_log TO loraplane_registry;
GRANT SELECT ON usage_events TO loraplane_registry;
GRANT SELECT, DELETE ON changes TO loraplane_registry;

GRANT SELECT ON tenants, quotas, pools, adapters, tenant_adapters, changes TO loraplane_data;
GRANT INSERT ON usage_events TO loraplane_data;
GRANT EXECUTE ON FUNCTION loraplane_find_key(bytea) TO loraplane_data;
