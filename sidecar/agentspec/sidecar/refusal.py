"""What the draft service refuses, and the gRPC status that says so."""

from __future__ import annotations

import grpc


class RefusalError(Exception):
    """A message or a part of it is refused; the table at the top of `draft.proto` says when which code is used.

    Attributes:
        code: never `UNKNOWN`.
        field: path of the field, as `step.positions` or `opens[2].tags_json`; empty: the call as a whole.
        reason: what was expected and what came; never text of a prompt or an output.
    """

    def __init__(self, code: grpc.StatusCode, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.code = code
        self.field = field
        self.reason = reason

    def within(self, path: str) -> RefusalError:
        """The same refusal of a part that lies at a path of a larger message."""
        return RefusalError(self.code, f"{path}.{self.field}" if self.field else path, self.reason)


def invalid(field: str, reason: str) -> RefusalError:
    """A field is malformed or outside its bound."""
    return RefusalError(grpc.StatusCode.INVALID_ARGUMENT, field, reason)


def not_found(field: str, reason: str) -> RefusalError:
    """A field names something that the server does not know."""
    return RefusalError(grpc.StatusCode.NOT_FOUND, field, reason)


def exhausted(field: str, reason: str) -> RefusalError:
    """A message, a batch or what the server holds is over its limit."""
    return RefusalError(grpc.StatusCode.RESOURCE_EXHAUSTED, field, reason)


def denied(field: str, reason: str) -> RefusalError:
    """The caller's identity may not use a namespace or a service."""
    return RefusalError(grpc.StatusCode.PERMISSION_DENIED, field, reason)
