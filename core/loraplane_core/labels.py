"""Kubernetes group, labels, annotations and finalizers, one place; the local cluster uses the same."""

GROUP = "loraplane.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
POOL_KIND = "BaseModelPool"
ADAPTER_KIND = "LoRAAdapter"
TENANT_KIND = "Tenant"

LABEL_POOL = f"{GROUP}/pool"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "loraplane-operator"
FIELD_MANAGER = "loraplane-operator"

#: On pools: the epoch that their credentials are wished to have; raising it rotates them.
#: On EndpointSlices: the epoch that the gateway derives its engine credentials with. Kubernetes copies labels of
#: a Service to its slices, but no annotations; so there it is a label.
#: On pods: the epoch that the engine was started with.
ANNOTATION_EPOCH = f"{GROUP}/credential-epoch"
FINALIZER = f"{GROUP}/finalizer"
