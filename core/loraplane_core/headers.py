"""HTTP header names, one place. The gateway strips every `x-loraplane-*` header that a client sends."""

PREFIX = "x-loraplane-"

# Client -> gateway: requests with the same value get the same one of an adapter's weighted versions.
STICKY = "x-loraplane-sticky"

# Gateway -> engine: the trusted reference (design §2).
ADAPTER = "x-loraplane-adapter"  # tenant/adapter@version, or identity.BASE_REFERENCE
DIGEST = "x-loraplane-digest"  # 64 hex; absent for the base
BYTES = "x-loraplane-bytes"  # artifact bytes
RANK = "x-loraplane-rank"
BASE_DIGEST = "x-loraplane-base-digest"  # the base the gateway resolved; an engine of another base refuses
TENANT = "x-loraplane-tenant"  # who asks; fairness between tenants needs it for the base, which has no owner
PROTOCOL = "x-loraplane-protocol"

# Engine -> gateway -> client.
ADAPTER_ID = "x-loraplane-adapter-id"
REPLICA = "x-loraplane-replica"
BOOT = "x-loraplane-boot"
RESIDENCY = "x-loraplane-residency"  # hit | cold
QUEUE_MS = "x-loraplane-queue-ms"
IGNORED_PARAMS = "x-loraplane-ignored-params"
REQUEST_ID = "x-request-id"

# Engine -> artifact listener.
POOL = "x-loraplane-pool"  # namespace/name
EPOCH = "x-loraplane-epoch"
