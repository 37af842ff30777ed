"""The configuration of AgentSpec: one table, read from vLLM's `additional_config` and from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from agentspec.sidecar.budget import MAX_INTENSITY, Policy
from agentspec.sidecar.engine import MAX_SPECULATIVE_TOKENS, TTL_S
from agentspec.sidecar.store.options import RedisOptions

ENV_PREFIX = "AGENTSPEC_"
MAX_HISTORY_BYTES = 1 << 42
STORED_TOKENS_PER_S = 100_000.0
ADDITIONAL_CONFIG_KEY = "agentspec"
OTLP_ENDPOINT = r"^https?://[^/\s]{1,1000}/?$"
NAMESPACE_PATTERN = r"^[\w.\-]+$"

DEFAULT_SOCKET = Path("/run/agentspec/draft.sock")
MAX_SOCKET_PATH = 107  # bytes, of the system


class OptionsError(ValueError):
    """An option is unknown or out of range; the message names it and says what was expected."""


def _check_socket(path: Path) -> Path:
    size = len(os.fsencode(path.absolute()))
    if size > MAX_SOCKET_PATH:
        raise PydanticCustomError("socket", f"expected a path of at most {MAX_SOCKET_PATH} bytes, this one has {size}")
    return path


SocketPath = Annotated[Path, AfterValidator(_check_socket)]


class Options(RedisOptions):
    """Options of one draft engine.

    Attributes:
        hook: `v2` for vLLM's Model Runner V2, `v1` for the V1 runner; `auto`: V2 on a GPU, where vLLM runs it.
        mode: `embedded` drafts in the engine's process; `hybrid` too, and shares its histories through a draft server;
            `sidecar` asks the draft server, which then holds the histories.
        socket: Unix socket of that server.
        namespace: the tenant that this engine serves; a wall that no history crosses.
        num_speculative_tokens: longest draft of a request.
        policy: which draft tokens are verified, see `agentspec.sidecar.budget.Policy`; `goodput` verifies what pays.
        arithmetic_intensity: tokens that one forward pass computes in the time that reading the weights takes; default:
            that of the accelerator found. `goodput` starts from it and learns; for `redundancy` and `uniform` the token
            budget of a step is this less its decode rows and prefill tokens.
        cost_model_file: where what was learned of step times is kept from one start to the next; default: nowhere.
        deadline_ms: longest wait of a step for its drafts; default 3 on a GPU, 30 on a CPU, whose steps are longer.
        history_bytes: memory of all histories, at most 4 TiB.
        namespace_bytes: memory of the histories of one namespace; default: all of it.
        stored_tokens_per_s: output tokens that one workflow may store per second, on average.
        ttl_s: a history that no request has used for so many seconds is dropped.
        isolation: `soft` weighs the block path in the vote, `strict` walls blocks off from each other.
        grammars_dir: folder of block grammars, ``<id>.json`` each, that requests may name in their tags.
        metrics_port: Prometheus metrics of the engine, plus the data-parallel rank; 0 switches them off.
        otlp_endpoint: gRPC port of an OpenTelemetry collector that gets the same metrics, as ``http://host:4317``.

    Those that begin with `redis` share the histories with other engines, see `RedisOptions`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hook: Literal["auto", "v1", "v2"] = "auto"
    mode: Literal["embedded", "hybrid", "sidecar"] = "embedded"
    socket: SocketPath = DEFAULT_SOCKET
    namespace: Annotated[str, Field(max_length=256, pattern=NAMESPACE_PATTERN)] = "default"
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = 16
    policy: Policy = "goodput"
    arithmetic_intensity: Annotated[float, Field(ge=1, le=MAX_INTENSITY, allow_inf_nan=False)] | None = None
    cost_model_file: Path | None = None
    deadline_ms: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] | None = None
    history_bytes: Annotated[int, Field(ge=1 << 20, le=MAX_HISTORY_BYTES)] = 1 << 30
    namespace_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = TTL_S
    stored_tokens_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = STORED_TOKENS_PER_S
    isolation: Literal["soft", "strict"] = "soft"
    grammars_dir: Path | None = None
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 9464
    otlp_endpoint: Annotated[str, Field(pattern=OTLP_ENDPOINT)] | None = None

    @field_validator("namespace_bytes")
    @classmethod
    def _check_namespace_bytes(cls, namespace_bytes: int | None, info: ValidationInfo) -> int | None:
        history_bytes = info.data.get("history_bytes")
        if namespace_bytes is not None and history_bytes is not None and namespace_bytes > history_bytes:
            raise ValueError(f"expected at most history_bytes, {history_bytes}")
        return namespace_bytes

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode != "embedded" and self.redis is not None:
            raise ValueError(f"redis: expected none in mode {self.mode}: give it to the draft server, which shares")
        return self


def read_options(config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """Merge `AGENTSPEC_*` variables and a configuration mapping; the mapping wins.

    Args:
        config: for instance `vllm_config.additional_config["agentspec"]`.
        environ: default `os.environ`; a variable that names no option is not ours.

    Raises:
        OptionsError: an option is unknown or out of range.
    """
    environ = os.environ if environ is None else environ
    merged: dict[str, Any] = {
        name: environ[ENV_PREFIX + name.upper()]
        for name in Options.model_fields
        if ENV_PREFIX + name.upper() in environ
    }
    merged |= config or {}
    try:
        return Options.model_validate(merged)
    except ValidationError as error:
        raise options_error(error) from None


def options_error(error: ValidationError) -> OptionsError:
    """What is wrong first, by the name of the option; a URL that may hold a password is not repeated."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        name, _, reason = first["msg"].removeprefix("Value error, ").partition(": ")
        return OptionsError(f"agentspec option {name!r}: {reason}")
    name = ".".join(map(str, first["loc"]))
    got = "" if name == "redis" else f", got {first['input']!r}"
    return OptionsError(f"agentspec option {name!r}: {first['msg']}{got}")
