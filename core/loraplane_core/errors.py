"""Every refusal Loraplane can give, with its HTTP status and stable code, and the one renderer.

LoraplaneError
├── InvalidRequest 400 ── InvalidJson, InvalidParameter, InvalidName, ContextLengthExceeded,
│                         BaseModelMismatch, MissingReference
├── ArtifactRejected 422 (code says which rule of preflight)
├── Unauthenticated 401
├── Forbidden 403 ── TenantNotBound
├── NotFound 404 ── ModelNotFound, TenantUnknown
├── Conflict 409 ── ClaimedByOther, ManagedByObject, ActivationOwned, DigestConflict, NotActivatable
├── Withdrawn 410
├── BodyTooLarge 413
├── TooManyRequests 429
├── Internal 500
├── Unavailable 503 ── ArtifactUnavailable, NoReplica, EngineBusy, InsufficientMemory, ProtocolMismatch
└── DeadlineExceeded 504 ── NotWarm

A message is written for the person who can act on it and may leave the system; anything that is not a
LoraplaneError is rendered as Internal and its text stays in the log.
"""

from typing import Any, ClassVar


class LoraplaneError(Exception):
    """A refusal. `param` names the request field at fault; `retry_after` is in seconds."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    #: False tells OpenAI clients not to retry (`x-should-retry`); None says nothing.
    should_retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        if code is not None:
            self.code = code

    @property
    def reason(self) -> str:
        """The CamelCase form of the code, as conditions and Events carry it."""
        return reason_of(self.code)


class InvalidRequest(LoraplaneError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidJson(InvalidRequest):
    code = "invalid_json"


class InvalidParameter(InvalidRequest):
    code = "invalid_parameter"


class InvalidName(InvalidRequest):
    code = "invalid_name"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class BaseModelMismatch(InvalidRequest):
    code = "base_model_mismatch"


class MissingReference(InvalidRequest):
    """A managed engine was asked without saying for which adapter."""

    code = "missing_reference"


class ArtifactRejected(LoraplaneError):
    """Preflight refused an artifact; give the rule as `code`, for example `unsupported_peft_field`."""

    status = 422
    type = "invalid_request_error"
    code = "artifact_rejected"


class Unauthenticated(LoraplaneError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(LoraplaneError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class TenantNotBound(Forbidden):
    code = "tenant_not_bound"


class NotFound(LoraplaneError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """Foreign, unknown and withdrawn models get this one body; it must not tell them apart."""

    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist or you do not have access to it.", param="model")


class TenantUnknown(NotFound):
    code = "tenant_unknown"


class Conflict(LoraplaneError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"
    should_retry = False


class ClaimedByOther(Conflict):
    code = "claimed_by_other"


class ManagedByObject(Conflict):
    code = "managed_by_object"


class ActivationOwned(Conflict):
    code = "activation_owned"


class DigestConflict(Conflict):
    """One id, two digests: somebody's view is wrong, and serving either would be a guess."""

    code = "digest_conflict"


class NotActivatable(Conflict):
    code = "not_activatable"


class Withdrawn(LoraplaneError):
    status = 410
    type = "invalid_request_error"
    code = "adapter_withdrawn"
    should_retry = False


class BodyTooLarge(LoraplaneError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"
    should_retry = False


class TooManyRequests(LoraplaneError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Internal(LoraplaneError):
    pass


class Unavailable(LoraplaneError):
    status = 503
    code = "unavailable"


class ArtifactUnavailable(Unavailable):
    code = "artifact_unavailable"


class NoReplica(Unavailable):
    code = "no_replica"


class EngineBusy(Unavailable):
    code = "engine_busy"


class InsufficientMemory(Unavailable):
    """The adapter does not fit now; the message holds the arithmetic."""

    code = "insufficient_memory"


class ProtocolMismatch(Unavailable):
    code = "protocol_mismatch"


class DeadlineExceeded(LoraplaneError):
    status = 504
    code = "deadline_exceeded"


class NotWarm(DeadlineExceeded):
    code = "not_warm"


def reason_of(code: str) -> str:
    """`base_model_mismatch` -> `BaseModelMismatch`."""
    return "".join(part.capitalize() for part in code.split("_"))


def error_object(error: LoraplaneError) -> dict[str, Any]:
    """The OpenAI error object, also used inside an SSE error event."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def render(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of any exception. The one place that turns errors into answers."""
    if not isinstance(error, LoraplaneError):
        error = Internal("The server had an internal error; it was logged under the request id.")
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    elif error.status == 503:
        headers["retry-after"] = "1"
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return error.status, error_object(error), headers


def from_wire(status: int, body: object) -> LoraplaneError:
    """Rebuild the error another Loraplane process answered with, keeping its code and message.

    Used by clients of our own admin ports; an unreadable body becomes Unavailable (5xx) or InvalidRequest.
    """
    inner = body.get("error") if isinstance(body, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("code"), str):
        kind: type[LoraplaneError] = Unavailable if status >= 500 else InvalidRequest
        return kind(f"the other side answered {status} without a readable error")
    code, message = inner["code"], str(inner.get("message", ""))
    param = inner.get("param") if isinstance(inner.get("param"), str) else None
    for kind in tree():
        if kind.code == code and kind is not ModelNotFound:
            return kind(message, param=param)
    base: type[LoraplaneError] = next((k for k in tree() if k.status == status and k is not ModelNotFound), Internal)
    return base(message, param=param, code=code)


def tree(root: type[LoraplaneError] = LoraplaneError) -> list[type[LoraplaneError]]:
    """The errors of this module from `root` down. A component's own subclasses are its business, not the wire's."""
    children = [child for child in root.__subclasses__() if child.__module__ == __name__]
    return [root, *(kind for child in children for kind in tree(child))]
