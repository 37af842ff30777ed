"""Who calls the server, and which namespaces they may use."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentspec.sidecar.options import NAMESPACE_PATTERN, OptionsError
from agentspec.sidecar.refusal import denied
from agentspec.sidecar.tags import MAX_NAME_BYTES
from agentspec.sidecar.wire import check_name

SOCKET_PEER = "unix:"
# Of a certificate, the more specific first; gRPC's names for them.
_NAME_PROPERTIES = ("x509_subject_alternative_name", "x509_common_name")


class CallContext(Protocol):
    """What a gRPC call says of its caller."""

    def peer(self) -> str:
        """Address, such as ``unix:`` or ``ipv4:10.0.0.7:41000``."""
        ...

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Names of the verified certificate; empty on the socket."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """An identity and its rights.

    Attributes:
        name: a name of its certificate, or `unix` for whoever may open the socket.
        namespaces: those that it may use, each with all that is within it; the first is what it means by none.
        has_history_role: it may read, write and delete histories.
        is_local: it came through the socket.
    """

    name: str
    namespaces: tuple[str, ...]
    has_history_role: bool = False
    is_local: bool = False

    def namespace(self, asked: str, field: str = "namespace") -> str:
        """The namespace that a request means.

        Raises:
            RefusalError: not within those of the caller, or longer than 256 bytes.
        """
        check_name(asked, field)
        if not asked:
            return self.namespaces[0]
        if not self.may_use(asked):
            raise denied(field, f"{self.name} may use {', '.join(self.namespaces)}, got {asked}")
        return asked

    def may_use(self, namespace: str) -> bool:
        """Whether a namespace is one of the caller's, or within one."""
        return any(namespace == own or namespace.startswith(f"{own}/") for own in self.namespaces)

    def check_history_role(self) -> None:
        """Refuse a caller that may only draft.

        Raises:
            RefusalError: it has not the history role.
        """
        if not self.has_history_role:
            raise denied("", f"{self.name} has not the history role")


class _Rights(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    namespaces: Annotated[
        list[Annotated[str, Field(pattern=NAMESPACE_PATTERN, max_length=MAX_NAME_BYTES)]], Field(min_length=1)
    ]
    history: bool = False


_RIGHTS = TypeAdapter(dict[str, _Rights])


def read_identities(path: Path) -> dict[str, Caller]:
    """Read which identity may use which namespaces.

    Args:
        path: TOML, or JSON if its name ends so; by the name in a certificate: ``{namespaces = […], history = false}``.

    Raises:
        OptionsError: the file can't be read or is malformed; names the entry.
    """
    try:
        content = path.read_text()
        table: Any = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
        rights = _RIGHTS.validate_python(table)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        entry = ".".join(map(str, first["loc"]))
        raise OptionsError(f"agentspec option 'tls_identities': {path}: {entry}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise OptionsError(f"agentspec option 'tls_identities': {path}: {error}") from None
    return {name: Caller(name, tuple(dict.fromkeys(own.namespaces)), own.history) for name, own in rights.items()}


class Callers:
    """Knows the caller of each call.

    Args:
        namespace: what those may use who come through the socket.
        identities: file for those who come over TCP; read again when it has changed.
    """

    def __init__(self, namespace: str, identities: Path | None = None) -> None:
        self._socket_caller = Caller("unix", (namespace,), has_history_role=True, is_local=True)
        self._path = identities
        self._changed_at = identities.stat().st_mtime_ns if identities else 0
        self._by_name = read_identities(identities) if identities else {}

    def of(self, context: CallContext) -> Caller:
        """The caller of a call.

        Raises:
            RefusalError: no name of its certificate is known here.
        """
        if context.peer().startswith(SOCKET_PEER):
            return self._socket_caller
        self._read_again()
        names = _names(context.auth_context())
        for name in names:
            if name in self._by_name:
                return self._by_name[name]
        raise denied("", f"no identity of this server is named {' or '.join(names) or '(no certificate)'}")

    def namespaces(self) -> list[str]:
        """All that callers may use, each with those within it."""
        self._read_again()
        callers = (self._socket_caller, *self._by_name.values())
        return [*dict.fromkeys(namespace for caller in callers for namespace in caller.namespaces)]

    def _read_again(self) -> None:
        if self._path is None:
            return
        try:
            changed_at = self._path.stat().st_mtime_ns
            if changed_at != self._changed_at:
                self._by_name = read_identities(self._path)
                self._changed_at = changed_at
        except (OSError, OptionsError):
            return  # half written, or gone for a moment: those of before hold


def _names(properties: Mapping[str, Iterable[bytes]]) -> Sequence[str]:
    return [
        value.decode(errors="replace")[:MAX_NAME_BYTES]
        for name in _NAME_PROPERTIES
        for value in properties.get(name, ())
    ]
