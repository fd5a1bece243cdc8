"""Errors, by whose fault they are and what the caller should do next.

    DisaggError
    ├── ConfigError            the operator's: a bad flag, file, or model directory; the process does not start
    ├── FilesChanged           the operator's, and it passes: a model's files changed while they were read; try again
    ├── RequestError           the client's: fix the request; never retried
    │   ├── InvalidRequest         a field is wrong (INVALID_ARGUMENT / 400)
    │   ├── Unauthenticated        it shows no credentials that are good here (UNAUTHENTICATED / 401)
    │   ├── UnknownModel           no such model here (NOT_FOUND / 404)
    │   └── UnknownServer          no such server in this cluster (404; gRPC's calls name none)
    ├── Overloaded             nobody's: try again after `retry_after_s` (RESOURCE_EXHAUSTED / 429)
    │   ├── Shed                   it would not have been answered in time
    │   └── QuotaExceeded          its tenant has asked for as much as it may
    ├── Unavailable            the cluster's: no server can take it now (UNAVAILABLE / 503)
    │   ├── RetriesSpent           it was lost with a server, as many others were, and is not run again
    │   └── NoCompatiblePeer       servers are there, but no prefill and decode server fit together
    ├── DeadlineExceeded       the request ran out of time (DEADLINE_EXCEEDED / 504)
    ├── Cancelled              the client went away or aborted it (CANCELLED / 499)
    ├── Interrupted            whoever ran the command pressed Ctrl-C
    ├── RequestFailed          the request was tried and cannot be finished, e.g. a poison request (INTERNAL / 500)
    └── ProtocolError          a peer or worker said something that it must not; the link or group ends

Bugs of our own are `assert`s, not members of this tree.
"""

from __future__ import annotations


class DisaggError(Exception):
    """Base of everything raised on purpose. `str(error)` is one sentence fit for the person who caused it."""


class ConfigError(DisaggError):
    """Configuration that cannot work. Says the path of the setting, its value, and what is allowed."""


class FilesChanged(DisaggError):
    """A model's files were written or replaced while they were loaded: what is in memory may be of two models."""


class RequestError(DisaggError):
    """The client's mistake. `param` names the offending field, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field of the request is missing, malformed, out of range, or not served."""


class Unauthenticated(RequestError):
    """The request shows no credentials that are good here. reason: one of a few words, for logs and counters."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnknownModel(RequestError):
    """The request names a model that this cluster does not serve."""


class UnknownServer(RequestError):
    """An operator's request names a server that is not there."""


class Overloaded(DisaggError):
    """A bounded queue is full; `retry_after_s` is a hint in seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Shed(Overloaded):
    """The request would wait longer for its first token than it may, or than it is of use for."""


class QuotaExceeded(Overloaded):
    """Whose key was shown has asked for as much as it may; see auth/quotas."""


class Unavailable(DisaggError):
    """No server can take the request now."""


class RetriesSpent(Unavailable):
    """The request was lost with a server, and as much was run again lately as the router runs again."""


class NoCompatiblePeer(Unavailable):
    """Servers of both roles are there, but their layouts differ, so no pair can serve."""


class DeadlineExceeded(DisaggError):
    """The request's deadline passed."""


class Cancelled(DisaggError):
    """The client cancelled or disconnected."""


class Interrupted(DisaggError):
    """Ctrl-C: the command was ended by the person who began it, and has tidied up."""


class RequestFailed(DisaggError):
    """The request was tried as often as is allowed and did not finish."""


class ProtocolError(DisaggError):
    """A message that the protocol forbids."""


def first_of(error: BaseException) -> BaseException:
    """The first error of a group, however deep; one that is no group is itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
