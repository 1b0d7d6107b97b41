-- Tables of the registry (design §6). Names are checked here; the grammar is the one of loraplane_core.identity.

CREATE FUNCTION loraplane_is_name(name text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN length(name) <= 63 AND name ~ '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$';

CREATE TABLE tenants (
    name       text PRIMARY KEY CHECK (loraplane_is_name(name)),
    namespaces text[] NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now()
);

-- `digest` is HMAC-SHA256(pepper, secret). `previous_*` is the second live secret while a key rotates.
CREATE TABLE api_keys (
    id                  text PRIMARY KEY,
    tenant_id           text NOT NULL REFERENCES tenants (name) ON DELETE CASCADE,
    name                text NOT NULL DEFAULT '',
    digest              bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
    previous_digest     bytea UNIQUE CHECK (octet_length(previous_digest) = 32),
    previous_expires_at timestamptz,
    scopes              text[] NOT NULL CHECK (scopes <@ ARRAY['inference', 'admin'] AND cardinality(scopes) > 0),
    created_at          timestamptz NOT NULL DEFAULT now(),
    expires_at          timestamptz,
    revoked_at          timestamptz
);
CREATE INDEX api_keys_tenant ON api_keys (tenant_id);

CREATE TABLE quotas (
    tenant_id           text PRIMARY KEY REFERENCES tenants (name) ON DELETE CASCADE,
    requests_per_minute int CHECK (requests_per_minute >= 0),
    tokens_per_minute   int CHECK (tokens_per_minute >= 0),
    concurrency         int CHECK (concurrency >= 0)
);

-- What the operator reported last; empty config and digest until an engine told them.
CREATE TABLE pools (
    namespace          text NOT NULL CHECK (loraplane_is_name(namespace)),
    name               text NOT NULL CHECK (loraplane_is_name(name)),
    base_model         text NOT NULL,
    aliases            text[] NOT NULL DEFAULT '{}',
    base_digest        text NOT NULL DEFAULT '' CHECK (base_digest ~ '^([0-9a-f]{64})?$'),
    config             jsonb NOT NULL DEFAULT '{}',
    max_rank           int NOT NULL,
    max_model_len      int NOT NULL DEFAULT 0,
    replicas           int NOT NULL DEFAULT 1,
    allowed_tenants    text[] NOT NULL DEFAULT '{}',
    allowed_namespaces text[] NOT NULL DEFAULT '{}',
    credential_epoch   int NOT NULL DEFAULT 1 CHECK (credential_epoch >= 1),
    PRIMARY KEY (namespace, name)
);

-- `next_version` makes sure that a version number is never used twice, whatever is deleted.
CREATE TABLE adapters (
    tenant_id        text NOT NULL CHECK (loraplane_is_name(tenant_id)),
    name             text NOT NULL CHECK (loraplane_is_name(name)),
    next_version     int NOT NULL DEFAULT 1,
    claim_uid        text UNIQUE,
    claim_ref        text NOT NULL DEFAULT '',
    activation_owner text NOT NULL DEFAULT 'registry' CHECK (activation_owner IN ('registry', 'object')),
    pool             text NOT NULL DEFAULT '',
    warm_replicas    int NOT NULL DEFAULT 1 CHECK (warm_replicas >= 0),
    pinned           boolean NOT NULL DEFAULT FALSE,
    previous_version int,
    created_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name)
);

CREATE TABLE tenant_adapters (
    tenant_id      text NOT NULL CHECK (loraplane_is_name(tenant_id)),
    adapter        text NOT NULL DEFAULT 'default' CHECK (loraplane_is_name(adapter)),
    version        int NOT NULL CHECK (version BETWEEN 1 AND 999999999),
    path           text NOT NULL DEFAULT '',
    rank           int NOT NULL DEFAULT 0 CHECK (rank >= 0),
    base_model     text NOT NULL DEFAULT '',
    is_active      boolean NOT NULL DEFAULT FALSE,
    created_at     timestamptz NOT NULL DEFAULT now(),
    digest         text CHECK (digest ~ '^[0-9a-f]{64}$'),
    base_digest    text CHECK (base_digest ~ '^[0-9a-f]{64}$'),
    base_evidence  text NOT NULL DEFAULT '' CHECK (base_evidence IN ('', 'artifact', 'declared')),
    bytes          bigint NOT NULL DEFAULT 0 CHECK (bytes >= 0),
    target_modules text[] NOT NULL DEFAULT '{}',
    state          text NOT NULL DEFAULT 'unverified'
                   CHECK (state IN ('unverified', 'pending_base', 'ingesting', 'validated', 'rejected')),
    reason         text NOT NULL DEFAULT '',
    message        text NOT NULL DEFAULT '',
    weight         int NOT NULL CHECK (weight BETWEEN 0 AND 100),
    PRIMARY KEY (tenant_id, adapter, version),
    CHECK (is_active = (weight > 0)),
    CHECK (NOT is_active OR state = 'validated'),
    CHECK (state <> 'validated' OR (digest IS NOT NULL AND base_digest IS NOT NULL AND bytes > 0))
);
CREATE INDEX tenant_adapters_digest ON tenant_adapters (digest) WHERE state = 'validated';

-- Idempotence of registering: one version per (object, hash of its source).
CREATE TABLE registrations (
    uid         text NOT NULL,
    source_hash text NOT NULL,
    tenant_id   text NOT NULL,
    adapter     text NOT NULL,
    version     int NOT NULL,
    PRIMARY KEY (uid, source_hash),
    FOREIGN KEY (tenant_id, adapter, version) REFERENCES tenant_adapters ON DELETE CASCADE
);

-- The work queue of ingestion; a row lives exactly as long as its version is pending_base or ingesting.
CREATE TABLE ingestions (
    tenant_id       text NOT NULL,
    adapter         text NOT NULL,
    version         int NOT NULL,
    source          text NOT NULL,
    expected_digest text,
    -- A row that somebody wrote by hand: the bytes must be what it says, and it is never merged into another.
    verify          boolean NOT NULL DEFAULT FALSE,
    activate        boolean NOT NULL DEFAULT FALSE,
    attempts        int NOT NULL DEFAULT 0,
    lease_until     timestamptz,
    queued_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, adapter, version),
    FOREIGN KEY (tenant_id, adapter, version) REFERENCES tenant_adapters ON DELETE CASCADE
);

CREATE TABLE uploads (
    id         text PRIMARY KEY,
    tenant_id  text NOT NULL REFERENCES tenants (name) ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
);

-- Append-only. (day, request_id) makes a replay from a spool idempotent.
CREATE TABLE usage_events (
    day               date NOT NULL,
    request_id        text NOT NULL,
    tenant_id         text NOT NULL,
    key_id            text NOT NULL,
    pool              text NOT NULL DEFAULT '',
    base_model        text NOT NULL DEFAULT '',
    adapter           text NOT NULL DEFAULT '',
    version           int NOT NULL DEFAULT 0,
    status            int NOT NULL,
    prompt_tokens     int NOT NULL DEFAULT 0,
    completion_tokens int NOT NULL DEFAULT 0,
    created_at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (day, request_id)
);
CREATE INDEX usage_events_tenant ON usage_events (tenant_id, day);

-- Append-only, ids only: never a prompt, a secret or a path.
CREATE TABLE audit_log (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT now(),
    actor      text NOT NULL,
    action     text NOT NULL,
    tenant_id  text NOT NULL DEFAULT '',
    subject    text NOT NULL DEFAULT '',
    version    int,
    from_version int
);

-- The ordered feed. `txid` lets one transaction leave one row per subject.
CREATE TABLE changes (
    cursor    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at        timestamptz NOT NULL DEFAULT now(),
    kind      text NOT NULL CHECK (kind IN ('adapter', 'tenant', 'pool', 'key')),
    tenant_id text NOT NULL DEFAULT '',
    name      text NOT NULL DEFAULT '',
    txid      xid8 NOT NULL DEFAULT pg_current_xact_id()
);
CREATE INDEX changes_txid ON changes (txid);
