"""The one place that touches the openai client: tags go into the body of each logical request."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from agentspec.middleware.scope import current_caller
from agentspec.middleware.tags import merge_xargs, payload_tags

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
XARGS_KEY = "vllm_xargs"
_LLM_PATHS = ("/chat/completions", "/completions", "/responses")
_PORTS = {"http": 80, "https": 443}
# They answer an unknown body field with an error, and our ids are none of their business.
_HOSTED = (
    *("ai21.com", "aliyuncs.com", "anthropic.com", "baseten.co", "bigmodel.cn", "cerebras.ai", "cloudflare.com"),
    *("cohere.ai", "cohere.com", "databricks.com", "azuredatabricks.net", "deepinfra.com", "deepseek.com"),
    *("fireworks.ai", "friendli.ai", "github.ai", "githubcopilot.com", "googleapis.com", "groq.com"),
    *("huggingface.co", "hyperbolic.xyz", "minimax.chat", "minimax.io", "minimaxi.com", "mistral.ai"),
    *("moonshot.ai", "moonshot.cn", "nebius.ai", "nebius.com", "novita.ai", "nvidia.com", "openai.com"),
    *("cognitiveservices.azure.com", "openai.azure.com", "services.ai.azure.com", "models.ai.azure.com"),
    *("inference.ai.azure.com", "openrouter.ai", "perplexity.ai", "sambanova.ai", "siliconflow.cn"),
    *("siliconflow.com", "stepfun.com", "together.ai", "together.xyz", "vercel.sh", "volces.com", "writer.com"),
    *("x.ai", "z.ai"),
)


class FailOpen:
    """Boundary around what runs inside the user's call: an error in the block is counted and does not leave it.

    `num_failures` counts by the error's class. At most one line a minute is logged; it names the class and the
    place, not the message, which could quote a prompt.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failures: Counter[str] = Counter()
        self._clock = clock
        self._silent_until_s = float("-inf")
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        with self._lock:
            self.num_failures[type(error).__name__] += 1
            total = self.num_failures.total()
            is_silent = self._clock() < self._silent_until_s
            if not is_silent:
                self._silent_until_s = self._clock() + LOG_INTERVAL_S
        if not is_silent:
            log.warning("LLM call left untagged: %s at %s (%d so far)", type(error).__name__, _place(trace), total)
        return True


def _place(trace: TracebackType | None) -> str:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"


fail_open = FailOpen()


def endpoints(base_urls: Sequence[str]) -> frozenset[str]:
    """``host:port`` of each base URL; paths do not matter.

    Raises:
        TypeError: a single string, or an element that is none.
        ValueError: no URL at all, or one that is not ``http(s)://host[:port]…``; the message holds it.
    """
    if isinstance(base_urls, str) or not isinstance(base_urls, Sequence):
        raise TypeError(f"base_urls: expected a list of URLs, got {type(base_urls).__name__}: {base_urls!r}")
    if not base_urls:
        raise ValueError("base_urls: expected at least one URL, got []: no call would carry tags")
    for url in base_urls:
        if not isinstance(url, str):
            raise TypeError(f"base_urls: expected URLs as str, got {type(url).__name__}: {url!r}")
        if _endpoint(url) is None:
            raise ValueError(f"base_urls: expected http(s)://host[:port], got {url!r}")
    return frozenset(endpoint for url in base_urls if (endpoint := _endpoint(url)))


def _endpoint(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    return f"{parts.hostname}:{port}" if parts.hostname and port else None


@functools.lru_cache(maxsize=256)
def may_be_tagged(url: str, allowed: frozenset[str] | None) -> bool:
    """Whether tags may go to `url`: its endpoint is in `allowed`, or, with `None`, no known hosted provider's."""
    if allowed is not None:
        return _endpoint(url) in allowed
    host = urlsplit(url).hostname or ""
    is_bedrock = host.startswith("bedrock") and host.endswith(".amazonaws.com")
    return not is_bedrock and not any(host == hosted or host.endswith("." + hosted) for hosted in _HOSTED)


def tagged_xargs(url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """`vllm_xargs` of a request with the tags of the current caller; None if this call gets no tags.

    Args:
        url: absolute URL of the server.
        body: the request's JSON body; not changed.
    """
    caller = current_caller()
    if caller is None or not may_be_tagged(url, caller.settings.endpoints):
        return None
    xargs = body.get(XARGS_KEY)
    if xargs is not None and not isinstance(xargs, Mapping):
        return None
    return merge_xargs(xargs or {}, caller.tags(), payload_tags(body))


def _with_tags(client: Any, options: Any) -> Any:
    """A copy of the request options that carries tags, or the options themselves."""
    body = options.json_data
    if not isinstance(body, dict) or not options.url.endswith(_LLM_PATHS):
        return options
    extra = options.extra_json or {}
    url = options.url if "://" in options.url else str(client.base_url)
    xargs = tagged_xargs(url, {**body, **extra} if extra else body)
    return options if xargs is None else options.model_copy(update={"extra_json": {**extra, XARGS_KEY: xargs}})


class _Instrumentation:
    """The patch of openai's client classes, put in at most once."""

    def __init__(self) -> None:
        self.is_active = False
        self._originals: dict[type, Callable[..., Any]] = {}
        self._patches: dict[type, Callable[..., Any]] = {}
        self._has_warned = False
        self._lock = threading.Lock()

    def start(self) -> bool:
        with self._lock:
            if not self._patches and not self._patch():
                return False
            self.is_active = True
            return True

    def stop(self) -> None:
        with self._lock:
            self.is_active = False
            # Somebody else's patch may lie over ours: then ours stays, and passes everything through.
            if all(vars(owner).get("request") is patch for owner, patch in self._patches.items()):
                for owner, original in self._originals.items():
                    setattr(owner, "request", original)  # noqa: B010 - a method of a class known only at run time
                self._patches.clear()
                self._originals.clear()

    def _patch(self) -> bool:
        owners = _hook_points()
        if owners is None:
            if not self._has_warned:
                log.warning("this openai client has no known hook point: LLM calls are left untagged")
            self._has_warned = True
            return False
        sync_client, async_client = owners
        for owner, patch in ((sync_client, self._sync_patch), (async_client, self._async_patch)):
            self._originals[owner] = vars(owner)["request"]
            self._patches[owner] = patch(self._originals[owner])
            setattr(owner, "request", self._patches[owner])  # noqa: B010 - as above
        return True

    def _tagged(self, client: Any, options: Any) -> Any:
        tagged = options
        if self.is_active:
            with fail_open:
                tagged = _with_tags(client, options)
        return tagged

    def _sync_patch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def request(client: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
            return original(client, cast_to, self._tagged(client, options), *args, **kwargs)

        return request

    def _async_patch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def request(client: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
            return await original(client, cast_to, self._tagged(client, options), *args, **kwargs)

        return request


def _hook_points() -> tuple[type, type] | None:
    """The client classes whose `request(cast_to, options, …)` sees every logical request once; None if it moved."""
    try:
        from openai import _base_client  # noqa: PLC0415 - private: only here, and only when asked for
    except ImportError:
        return None
    for name in ("SyncAPIClient", "AsyncAPIClient"):
        request = vars(getattr(_base_client, name, object)).get("request")
        if request is None or list(inspect.signature(request).parameters)[1:3] != ["cast_to", "options"]:
            return None
    return _base_client.SyncAPIClient, _base_client.AsyncAPIClient


_instrumentation = _Instrumentation()


def instrument_openai() -> bool:
    """Tag the requests of every openai client of this process that are made inside wrapped graphs; idempotent.

    `AgentSpecMiddleware` calls it. Works with the openai package 1.109 to 3.57.

    Returns:
        False, after one warning, if the openai client has no known hook point: then no call is tagged.
    """
    return _instrumentation.start()


def uninstrument_openai() -> None:
    """Stop tagging; wrapped graphs go on working, untagged. Idempotent."""
    _instrumentation.stop()
