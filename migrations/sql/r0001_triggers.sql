-- What must hold even for rows written by hand in psql.

-- A version row makes its adapter, locks it (so writers of one adapter queue up) and moves its counter.
CREATE FUNCTION loraplane_before_version() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    NEW.weight := coalesce(NEW.weight, CASE WHEN NEW.is_active THEN 100 ELSE 0 END);
    INSERT INTO public.adapters (tenant_id, name, next_version)
        VALUES (NEW.tenant_id, NEW.adapter, NEW.version + 1)
        ON CONFLICT (tenant_id, name) DO NOTHING;
    PERFORM 1 FROM public.adapters WHERE tenant_id = NEW.tenant_id AND name = NEW.adapter FOR UPDATE;
    UPDATE public.adapters SET next_version = NEW.version + 1
        WHERE tenant_id = NEW.tenant_id AND name = NEW.adapter AND next_version <= NEW.version;
    RETURN NEW;
END $$;
CREATE TRIGGER version_before BEFORE INSERT OR UPDATE ON tenant_adapters
    FOR EACH ROW EXECUTE FUNCTION loraplane_before_version();

CREATE FUNCTION loraplane_before_version_delete() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    PERFORM 1 FROM public.adapters WHERE tenant_id = OLD.tenant_id AND name = OLD.adapter FOR UPDATE;
    RETURN OLD;
END $$;
CREATE TRIGGER version_before_delete BEFORE DELETE ON tenant_adapters
    FOR EACH ROW EXECUTE FUNCTION loraplane_before_version_delete();

-- SECURITY DEFINER: row-level security must not hide a row from the sum.
CREATE FUNCTION loraplane_check_weights() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    subject public.tenant_adapters;
    total   bigint;
BEGIN
    IF TG_OP = 'DELETE' THEN subject := OLD; ELSE subject := NEW; END IF;
    SELECT coalesce(sum(weight), 0) INTO total FROM public.tenant_adapters
        WHERE tenant_id = subject.tenant_id AND adapter = subject.adapter;
    IF total NOT IN (0, 100) THEN
        RAISE EXCEPTION 'the weights of %/% sum to %, not to 0 or 100', subject.tenant_id, subject.adapter, total
            USING ERRCODE = 'check_violation', CONSTRAINT = 'tenant_adapters_weight_sum';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER version_weights AFTER INSERT OR UPDATE OR DELETE ON tenant_adapters
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION loraplane_check_weights();

-- The feed. All writers of the feed pass one lock that is held to the end of the transaction, and cursors are
-- drawn under it: they become visible in their order, so a reader that saw N never misses a smaller one.
-- The triggers are deferred, so the lock is the last one a transaction takes and cannot be part of a deadlock.
CREATE FUNCTION loraplane_note_change(change_kind text, change_tenant text, change_name text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(5498691723);
    IF NOT EXISTS (SELECT 1 FROM public.changes WHERE txid = pg_current_xact_id()
                   AND kind = change_kind AND tenant_id = change_tenant AND name = change_name) THEN
        INSERT INTO public.changes (kind, tenant_id, name) VALUES (change_kind, change_tenant, change_name);
        PERFORM pg_notify('loraplane_changes', '');
    END IF;
END $$;

CREATE FUNCTION loraplane_on_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    subject jsonb;
BEGIN
    -- An update that moves a row to another key is a change of both.
    FOREACH subject IN ARRAY CASE TG_OP
        WHEN 'INSERT' THEN ARRAY[to_jsonb(NEW)]
        WHEN 'DELETE' THEN ARRAY[to_jsonb(OLD)]
        ELSE ARRAY[to_jsonb(OLD), to_jsonb(NEW)] END
    LOOP
        CASE TG_TABLE_NAME
            WHEN 'tenant_adapters' THEN
                PERFORM public.loraplane_note_change('adapter', subject->>'tenant_id', subject->>'adapter');
            WHEN 'adapters' THEN
                PERFORM public.loraplane_note_change('adapter', subject->>'tenant_id', subject->>'name');
            WHEN 'tenants' THEN
                PERFORM public.loraplane_note_change('tenant', subject->>'name', '');
            WHEN 'pools' THEN
                PERFORM public.loraplane_note_change('pool', '', (subject->>'namespace') || '/' || (subject->>'name'));
            WHEN 'api_keys' THEN
                PERFORM public.loraplane_note_change('key', subject->>'tenant_id', subject->>'id');
        END CASE;
    END LOOP;
    RETURN NULL;
END $$;

CREATE FUNCTION loraplane_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: %', TG_OP, TG_TABLE_NAME, TG_ARGV[0] USING ERRCODE = 'restrict_violation';
END $$;

DO $$
DECLARE
    fed text;
BEGIN
    FOREACH fed IN ARRAY ARRAY['tenant_adapters', 'adapters', 'tenants', 'pools', 'api_keys'] LOOP
        EXECUTE format('CREATE CONSTRAINT TRIGGER feed AFTER INSERT OR DELETE ON %I DEFERRABLE INITIALLY DEFERRED
                        FOR EACH ROW EXECUTE FUNCTION loraplane_on_change()', fed);
        EXECUTE format('CREATE CONSTRAINT TRIGGER feed_update AFTER UPDATE ON %I DEFERRABLE INITIALLY DEFERRED
                        FOR EACH ROW WHEN (OLD IS DISTINCT FROM NEW) EXECUTE FUNCTION loraplane_on_change()', fed);
        EXECUTE format('CREATE TRIGGER no_truncate BEFORE TRUNCATE ON %I EXECUTE FUNCTION
                        loraplane_refuse(''the change feed would miss it; use DELETE'')', fed);
    END LOOP;
END $$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION loraplane_refuse('it is append-only');
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON usage_events
    FOR EACH STATEMENT EXECUTE FUNCTION loraplane_refuse('it is append-only');
