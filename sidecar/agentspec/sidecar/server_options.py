"""The configuration of `agentspec-sidecar serve`: one table for flags, variables and file."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ByteSize, ConfigDict, Field, ValidationError, model_validator

from agentspec.sidecar.budget import MAX_INTENSITY, Policy
from agentspec.sidecar.engine import MAX_SPECULATIVE_TOKENS
from agentspec.sidecar.options import (
    DEFAULT_SOCKET,
    MAX_HISTORY_BYTES,
    NAMESPACE_PATTERN,
    OTLP_ENDPOINT,
    STORED_TOKENS_PER_S,
    OptionsError,
    SocketPath,
    options_error,
)
from agentspec.sidecar.store.options import RedisOptions

DISTRIBUTION = "agentspec-serving"
MIB = 1 << 20
GIB = 1 << 30
MAX_MESSAGE_BYTES = 64 * MIB

_Port = Annotated[int, Field(ge=0, le=65535)]
_Seconds = Annotated[float, Field(gt=0, le=30 * 86400, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=1 << 20)]
_Memory = Annotated[ByteSize, Field(ge=MIB, le=MAX_HISTORY_BYTES)]


class ServerOptions(RedisOptions):
    """Options of a draft server; each is a flag ``--<name>``, a variable ``AGENTSPEC_<NAME>`` and a key of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    socket: SocketPath = Field(
        DEFAULT_SOCKET,
        description="Unix socket to listen on, made with mode 0660; at most 107 bytes.",
    )
    namespace: Annotated[str, Field(max_length=256, pattern=NAMESPACE_PATTERN)] = Field(
        "default", description="The tenant of those who come through the socket; no history crosses it."
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = Field(
        16, description="Longest draft of a request, 1 to 64."
    )
    policy: Policy = Field(
        "goodput", description="Which draft tokens are verified; off drafts never, shadow only counts."
    )
    isolation: Literal["soft", "strict"] = Field(
        "soft", description="soft: the block path weighs in the vote; strict: walls blocks off from each other."
    )
    arithmetic_intensity: Annotated[float, Field(ge=1, le=MAX_INTENSITY, allow_inf_nan=False)] | None = Field(
        None, description="Tokens that an engine computes while it reads the weights; limits redundancy and uniform."
    )
    grammars_dir: Path | None = Field(
        None, description="Folder of block markers, <id>.json each, that requests may name in their tags."
    )
    history_bytes: _Memory = Field(
        ByteSize(GIB), description="Memory of all histories, split evenly over max_models; bytes, or 4GiB."
    )
    namespace_bytes: _Memory | None = Field(
        None, description="Memory of the histories of one namespace, at most history_bytes; default: all of it."
    )
    request_bytes: _Memory = Field(
        ByteSize(GIB), description="Memory of all open requests; more are refused with RESOURCE_EXHAUSTED."
    )
    ttl_s: _Seconds = Field(86400, description="History that no request has used for so long is forgotten.")
    stored_tokens_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        STORED_TOKENS_PER_S,
        description="Output tokens that one workflow may store per second on average; what is beyond is not stored.",
    )
    max_models: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Vocabularies at a time; one more makes the server forget the one that is idle longest."
    )
    max_open_requests: _Count = Field(65536, description="Of all clients together.")
    max_calls: _Count = Field(1024, description="gRPC calls at a time; each engine holds one, its stream.")
    max_message_bytes: Annotated[ByteSize, Field(ge=64 * 1024, le=MAX_MESSAGE_BYTES)] = Field(
        ByteSize(8 * MIB), description="Of one message in either direction."
    )
    step_deadline_ms: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = Field(
        10, description="Rows of a step that are not drafted within it get no draft; 0: all are."
    )
    idle_request_s: _Seconds = Field(
        600, description="Requests opened outside of a stream are closed when not heard of for so long."
    )
    drain_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = Field(
        5, description="Time for calls in flight after SIGTERM."
    )
    tcp: str | None = Field(
        None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:]+):\d{1,5}$",
        description="Also listen on HOST:PORT, with mutual TLS; needs the four tls options.",
    )
    tls_cert: Path | None = Field(None, description="Certificate chain of the server, PEM; read again when it changes.")
    tls_key: Path | None = Field(None, description="Its private key, PEM.")
    tls_client_ca: Path | None = Field(None, description="Authorities that sign the clients' certificates, PEM.")
    tls_identities: Path | None = Field(
        None,
        description='TOML or JSON: "<name in a client\'s certificate>" = {namespaces = ["team-a"], history = false}.',
    )
    health_port: _Port = Field(0, description="TCP port that answers gRPC health checks and nothing else; 0: none.")
    metrics_port: _Port = Field(9460, description="TCP port of Prometheus metrics; 0: none.")
    otlp_endpoint: str | None = Field(
        None,
        pattern=OTLP_ENDPOINT,
        description="gRPC port of an OpenTelemetry collector that gets the same metrics, and spans: http://HOST:4317.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level of a log line.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.namespace_bytes is not None and self.namespace_bytes > self.history_bytes:
            raise ValueError(
                f"namespace_bytes: expected at most history_bytes, {self.history_bytes}, got {self.namespace_bytes}"
            )
        missing = [name for name in TLS_OPTIONS if getattr(self, name) is None]
        if self.tcp is not None and missing:
            raise ValueError(f"{missing[0]}: tcp needs it")
        if self.tcp is None and len(missing) < len(TLS_OPTIONS):
            raise ValueError("tcp: the tls options need it")
        return self


def package_version() -> str:
    """Version of the installed distribution; `unknown` in a source tree that is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


TLS_OPTIONS = ("tls_cert", "tls_key", "tls_client_ca", "tls_identities")


def read_server_options(given: Mapping[str, Any], file: Path | None = None) -> ServerOptions:
    """Merge a file and what was given otherwise, which wins.

    Args:
        given: by option, from flags and variables.
        file: TOML, or JSON if its name ends so.

    Raises:
        OptionsError: an option is unknown or out of range, or the file can't be read; names it.
    """
    merged = {**(_read_file(file) if file else {}), **given}
    try:
        return ServerOptions.model_validate(merged)
    except ValidationError as error:
        raise options_error(error) from None


def _read_file(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text()
        content: Any = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise OptionsError(f"agentspec option 'config': {file}: {error}") from None
    if not isinstance(content, dict):
        raise OptionsError(f"agentspec option 'config': {file}: expected a table, got {type(content).__name__}")
    return content
