"""Opt-in, for clients that do not end in the openai package: tags at the `send` of httpx clients."""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from agentspec.middleware.calls import XARGS_KEY, TaggedCall, is_llm_request, tag_call
from agentspec.middleware.fail_open import fail_open
from agentspec.middleware.inject import is_in_openai_request

MODULES = ("httpx", "httpx2")

_patches: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # client class -> original, patch
_lock = threading.Lock()
_state = {"is_active": False}


def instrument_httpx(*module_names: str) -> list[str]:
    """Tag LLM calls that httpx clients of this process send as JSON inside wrapped graphs; idempotent.

    For clients with an HTTP layer of their own, such as litellm's ``hosted_vllm/…``. Calls of the openai package are
    tagged above this layer, and not again here.

    Args:
        *module_names: default: ``httpx`` and ``httpx2``, those of them that are installed.

    Returns:
        Names of the modules that are instrumented.

    Raises:
        ImportError: a module that was named is not installed.
        ValueError: a module that was named has no `Client.send`; names it.
    """
    with _lock:
        modules = _modules(module_names)
        for module in modules:
            _patch(module)
        _state["is_active"] = True
        return [module.__name__ for module in modules]


def uninstrument_httpx() -> None:
    """Stop tagging at httpx. Idempotent."""
    with _lock:
        _state["is_active"] = False
        for owner, (original, patch) in list(_patches.items()):
            if vars(owner).get("send") is patch:  # else another patch lies over ours, which then passes all through
                setattr(owner, "send", original)  # noqa: B010 - a class known only at run time
                del _patches[owner]


def _modules(names: tuple[str, ...]) -> list[ModuleType]:
    found = []
    for name in names or MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            if names:
                raise
            continue
        if not all(hasattr(getattr(module, owner, None), "send") for owner in ("Client", "AsyncClient")):
            raise ValueError(f"instrument_httpx: expected a module with Client.send and AsyncClient.send, got {name!r}")
        found.append(module)
    return found


def _patch(module: ModuleType) -> None:
    for owner, patched in ((module.Client, _sync_send), (module.AsyncClient, _async_send)):
        if owner not in _patches:
            original = owner.send
            patch = patched(original, module)
            _patches[owner] = original, patch
            owner.send = patch


def _sync_send(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(client: Any, request: Any, **kwargs: Any) -> Any:
        request, call = _opened(module, request)
        if call is None:
            return original(client, request, **kwargs)
        with call.failing():
            response = original(client, request, **kwargs)
        _answered(call, response, is_stream=bool(kwargs.get("stream")))
        return response

    return send


def _async_send(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(original)
    async def send(client: Any, request: Any, **kwargs: Any) -> Any:
        request, call = _opened(module, request)
        if call is None:
            return await original(client, request, **kwargs)
        with call.failing():
            response = await original(client, request, **kwargs)
        _answered(call, response, is_stream=bool(kwargs.get("stream")))
        return response

    return send


def _opened(module: ModuleType, request: Any) -> tuple[Any, TaggedCall | None]:
    """A tagged copy of the request and its call; the request itself and None if it gets no tags."""
    opened: tuple[Any, TaggedCall | None] = request, None
    if _state["is_active"] and not is_in_openai_request():
        with fail_open:
            opened = _tagged(module, request)
    return opened


def _tagged(module: ModuleType, request: Any) -> tuple[Any, TaggedCall | None]:
    if request.method != "POST" or not is_llm_request(request.url.path):
        return request, None
    if not isinstance(request.stream, module.ByteStream):  # an upload in pieces can be read once only
        return request, None
    body = json.loads(request.read())
    call = tag_call(str(request.url), body) if isinstance(body, dict) else None
    if call is None:
        return request, None
    content = json.dumps({**body, XARGS_KEY: call.xargs}).encode()
    headers = module.Headers({**call.headers, **dict(request.headers)})
    headers["content-length"] = str(len(content))
    tagged = module.Request(
        request.method, request.url, headers=headers, content=content, extensions=request.extensions
    )
    return tagged, call


def _answered(call: TaggedCall, response: Any, *, is_stream: bool) -> None:
    """Read the figures of an answer; those of a stream are the user's to read."""
    with fail_open:
        if response.status_code >= 400:
            call.fail()
        elif not is_stream:
            call.answer = json.loads(response.content)
    call.finish()
