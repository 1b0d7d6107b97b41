"""What the operator counts. Labels are kinds and phases, never names of tenants or objects."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

PHASE_SECONDS = Histogram(
    "loraplane_operator_phase_seconds",
    "Seconds per phase of reconciling (observe, plan) and per kind of action.",
    ["phase"],
    registry=REGISTRY,
    buckets=_BUCKETS,
)
QUEUE_AGE = Gauge(
    "loraplane_operator_queue_age_seconds",
    "Age of the oldest news that no pass has taken up, and of the oldest action that waits for its turn.",
    ["queue"],
    registry=REGISTRY,
)
API_REQUESTS = Counter(
    "loraplane_operator_api_requests_total",
    "Requests to the Kubernetes API, without the watches; code 0 is no answer.",
    ["verb", "resource", "code"],
    registry=REGISTRY,
)
RETRIES = Counter(
    "loraplane_operator_retries_total", "Actions tried again after a failure.", ["action"], registry=REGISTRY
)
ACTIONS = Counter("loraplane_operator_actions_total", "Actions carried out.", ["action", "outcome"], registry=REGISTRY)
DRIFT_FOUND = Counter(
    "loraplane_operator_drift_found_total", "Warm adapters that a replica was found to have lost.", registry=REGISTRY
)
DRIFT_HEALED = Counter(
    "loraplane_operator_drift_healed_total", "Lost warm adapters that were warmed again.", registry=REGISTRY
)
OBJECTS = Gauge("loraplane_operator_objects", "Objects observed.", ["kind"], registry=REGISTRY)
ENGINES = Gauge("loraplane_operator_engines_alive", "Replicas with a live state stream.", registry=REGISTRY)
PASSES = Counter("loraplane_operator_passes_total", "Reconcile passes.", ["outcome"], registry=REGISTRY)
