-- Everything here has a default, so the previous release can go on reading and writing these tables.

ALTER TABLE tenant_adapters ADD COLUMN parameters bigint NOT NULL DEFAULT 0 CHECK (parameters >= 0);

ALTER TABLE adapters
    -- The version that served all requests last: what a rollback goes to while several have a share, or none.
    ADD COLUMN last_sole int,
    -- Of the source that the claim's object registered last; its version is what `registrations` says now.
    ADD COLUMN source_hash text NOT NULL DEFAULT '',
    -- An activation that waits until the operator saw its version warm. Past its deadline it is as good as gone.
    ADD COLUMN intent_id text,
    ADD COLUMN intent_version int,
    ADD COLUMN intent_deadline timestamptz,
    ADD COLUMN intent_action text,
    ADD COLUMN intent_actor text,
    -- The last intent that came true; by it whoever waits tells that from being replaced.
    ADD COLUMN intent_done text,
    ADD CHECK (num_nonnulls(intent_id, intent_version, intent_deadline, intent_action, intent_actor) IN (0, 5));
CREATE INDEX adapters_intent ON adapters (intent_deadline) WHERE intent_id IS NOT NULL;

-- Which shares were set, as `version=weight`; still ids and numbers only.
ALTER TABLE audit_log ADD COLUMN detail text NOT NULL DEFAULT '';

UPDATE adapters a SET last_sole = v.version FROM tenant_adapters v
    WHERE v.tenant_id = a.tenant_id AND v.adapter = a.name AND v.weight = 100;
-- Of several registrations nobody knows which was the last.
UPDATE adapters a SET source_hash = r.source_hash FROM (
        SELECT uid, min(source_hash) AS source_hash FROM registrations GROUP BY uid HAVING count(*) = 1) r
    WHERE r.uid = a.claim_uid;
