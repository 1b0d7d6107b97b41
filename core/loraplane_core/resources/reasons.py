"""Every reason a condition or Event may carry, each with its explanation.

A reason is the CamelCase of the API's error code, so `BaseModelMismatch` in `kubectl get` and
`base_model_mismatch` in an HTTP answer are one thing to look up.
"""

from enum import StrEnum

from loraplane_core.errors import reason_of


class Reason(StrEnum):
    def __new__(cls, value: str, doc: str = "") -> "Reason":
        member = str.__new__(cls, value)
        member._value_ = value
        member.__doc__ = doc
        return member

    READY = "Ready", "Everything this condition is about holds."
    PENDING = "Pending", "Work has not begun; the message says what it waits for."
    PROGRESSING = "Progressing", "Work is under way; the message says how far."
    DELETING = "Deleting", "The object is being deleted; its adapter is drained first."
    DELETION_TIMED_OUT = "DeletionTimedOut", "Draining reached its deadline; the object goes anyway."

    CLAIMED = "Claimed", "This object speaks for the adapter."
    TENANT_UNKNOWN = "TenantUnknown", "No such tenant exists; resumed once it is created."
    TENANT_NOT_BOUND = "TenantNotBound", "The tenant does not list the object's namespace."
    CLAIMED_BY_OTHER = "ClaimedByOther", "Another object claimed the same adapter first."
    IMMUTABLE_FIELD = "ImmutableField", "An edit changed a field that may not change; the old value stays in force."
    RESERVED_NAME = "ReservedName", "The adapter's name is that of a base model or an alias."

    POOL_NOT_FOUND = "PoolNotFound", "poolRef names no pool."
    POOL_NOT_ALLOWED = "PoolNotAllowed", "The pool does not admit this tenant or namespace."
    POOL_NAMESPACE_NOT_HONOURED = "PoolNamespaceNotHonoured", "Pools are not honoured in this namespace."

    PENDING_BASE = "PendingBase", "The base's configuration is not known yet; resumed once an engine told it."
    INGESTING = "Ingesting", "The registry fetches and checks the artifact."
    INGESTED = "Ingested", "The artifact is in the artifact store."
    VALIDATED = "Validated", "Preflight accepted the artifact."
    UNVERIFIED = "Unverified", "The version was inserted by hand and has not been verified."
    SOURCE_NOT_FOUND = "SourceNotFound", "The source holds no artifact."
    SOURCE_NOT_ALLOWED = "SourceNotAllowed", "The source lies outside the roots that may be read."
    SOURCE_UNAVAILABLE = "SourceUnavailable", "The source could not be read; it is tried again."
    DIGEST_MISMATCH = "DigestMismatch", "The bytes have another digest than the one declared."
    BASE_MODEL_MISMATCH = "BaseModelMismatch", "The adapter was trained for another base model."

    ARTIFACT_REJECTED = "ArtifactRejected", "Preflight refused the artifact; the message says why."
    MISSING_FILE = "MissingFile", "One of the two files is missing."
    UNSAFE_FORMAT = "UnsafeFormat", "The weights are in a format that can run code; safetensors is required."
    UNSAFE_PATH = "UnsafePath", "A file is a link or not a plain file."
    TOO_LARGE = "TooLarge", "A file exceeds its size limit."
    MALFORMED_CONFIG = "MalformedConfig", "adapter_config.json is not strict JSON."
    INVALID_PEFT_CONFIG = "InvalidPeftConfig", "A field of adapter_config.json has an unusable value."
    UNSUPPORTED_PEFT_FIELD = "UnsupportedPeftField", "A field of adapter_config.json asks for what is not served."
    MALFORMED_WEIGHTS = "MalformedWeights", "The safetensors file is malformed or truncated."
    UNSUPPORTED_DTYPE = "UnsupportedDtype", "A tensor is neither float32, float16 nor bfloat16."
    UNKNOWN_TENSOR = "UnknownTensor", "A tensor would not be used; serving without it would be another model."
    INCOMPLETE_PAIR = "IncompletePair", "A lora_A or lora_B lacks its other half."
    NO_LORA_TENSORS = "NoLoraTensors", "The artifact changes no module."
    DEAD_ADAPTER = "DeadAdapter", "All weights multiply to zero: answers would be the base's."
    NOT_FINITE = "NotFinite", "A weight is NaN or infinite."
    RANK_MISMATCH = "RankMismatch", "Tensors and configuration disagree about a rank."
    RANK_TOO_HIGH = "RankTooHigh", "The rank exceeds the pool's maxRank."
    SHAPE_MISMATCH = "ShapeMismatch", "A tensor does not fit the base's shapes."

    PLACED = "Placed", "The replicas that should be warm are chosen."
    LOADING = "Loading", "A replica is loading the adapter."
    LOAD_FAILED = "LoadFailed", "A replica failed to load the adapter."
    INSUFFICIENT_MEMORY = "InsufficientMemory", "The adapter does not fit; the message has the arithmetic."
    REPLICA_NOT_READY = "ReplicaNotReady", "A replica that should hold the adapter is not ready."
    NO_REPLICA = "NoReplica", "The pool has no ready replica."
    NOT_WARM = "NotWarm", "The adapter is not resident where it should be."
    NOT_ACTIVATED = "NotActivated", "No version is active."
    NOT_ACTIVATABLE = "NotActivatable", "The version asked for is not validated."
    ACTIVE_CHANGED = "ActiveChanged", "Another version became active meanwhile; the object's is set again."
    TRAFFIC_CHANGED = "TrafficChanged", "Other weights were set meanwhile; the object's are set again."
    ACTIVATION_NOT_OWNED = "ActivationNotOwned", "The registry has yet to learn that the object decides what serves."
    ENGINE_BUSY = "EngineBusy", "An engine has no room in its queue; tried again."
    ENGINE_FAILED = "EngineFailed", "An engine's core died while it loaded; tried again."
    IMAGE_BROKEN = "ImageBroken", "An engine's copy of the artifact cannot be read; it is made again."
    CONVERSION_FAILED = "ConversionFailed", "An engine could not convert the artifact; the message says why."
    NO_EFFECT = "NoEffect", "An engine answers that it is done, which its state does not show; tried ever more rarely."
    DRIFTED = "Drifted", "A replica lost an adapter that should be warm."
    HEALED = "Healed", "A replica holds again what it had lost."
    ARTIFACT_UNAVAILABLE = "ArtifactUnavailable", "The artifact store cannot be read now."
    DIGEST_CONFLICT = "DigestConflict", "Two parties disagree about a version's digest."
    ADAPTER_WITHDRAWN = "AdapterWithdrawn", "The version was withdrawn."

    AVAILABLE = "Available", "At least one replica serves."
    SCALING = "Scaling", "Replicas leave, one at a time, each once its adapters are warm elsewhere."
    STARTING = "Starting", "Replicas are starting."
    ROLLING = "Rolling", "Replicas are being replaced, one at a time."
    CRASH_LOOP = "CrashLoop", "A replica keeps dying."
    BASE_NOT_FOUND = "BaseNotFound", "The base model's files are missing."
    BASE_DIGEST_MISMATCH = "BaseDigestMismatch", "A replica holds other base weights than declared."
    NAME_TAKEN = "NameTaken", "An object that the pool needs exists under that name and is somebody else's."
    POD_TEMPLATE_NOT_ALLOWED = "PodTemplateNotAllowed", "podTemplate asks for what the platform does not allow pools."
    INVALID_EPOCH = "InvalidEpoch", "The annotation for the epoch of credentials is no whole number from 1 on."
    ROLLOUT_STALLED = "RolloutStalled", "A replaced replica does not become ready; no further one is replaced."
    BASE_NAME_CONFLICT = "BaseNameConflict", "An older pool serves other weights under the same base name."
    SCALED_TO_ZERO = "ScaledToZero", "The pool has no replicas by choice."
    HEALTHY = "Healthy", "Nothing is degraded."
    UNINSTALLED = "Uninstalled", "The release was uninstalled; nobody serves or reconciles the object."

    REGISTRY_UNAVAILABLE = "RegistryUnavailable", "The registry does not answer; tried again."
    DATABASE_UNAVAILABLE = "DatabaseUnavailable", "The registry cannot reach its database; tried again."
    ENGINE_UNREACHABLE = "EngineUnreachable", "An engine does not answer; tried again."
    CLUSTER_UNAVAILABLE = "ClusterUnavailable", "The cluster or supervisor does not answer; tried again."
    PROTOCOL_MISMATCH = "ProtocolMismatch", "Two components speak protocols too far apart."
    DEADLINE_EXCEEDED = "DeadlineExceeded", "An operation took longer than its deadline."
    UNAVAILABLE = "Unavailable", "A component does not answer; tried again."
    INTERNAL_ERROR = "InternalError", "A defect; the log has the details."
    REFUSED = (
        "Refused",
        "Another component refused with a code that has no reason of its own; the message has its words.",
    )


def reason_for(code: str) -> Reason:
    """The reason that an error code is shown as. The enum is closed: what it does not know is Refused."""
    try:
        return Reason(reason_of(code))
    except ValueError:
        return Reason.REFUSED
