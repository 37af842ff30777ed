"""The one place that touches the openai client: tags go into the body of each logical request, figures come back."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agentspec.middleware.calls import XARGS_KEY, TaggedCall, is_llm_request, tag_call
from agentspec.middleware.fail_open import fail_open
from agentspec.middleware.feedback import says_anything
from agentspec.middleware.scope import bound

log = logging.getLogger(__name__)

_in_openai_request: ContextVar[bool] = ContextVar("agentspec_in_openai_request", default=False)


def is_in_openai_request() -> bool:
    """Whether an openai client that has been seen to is sending here: what lies below it must not tag again."""
    return _in_openai_request.get()


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A request that carries tags and is on its way.

    Attributes:
        options: to send instead of the user's.
    """

    options: Any
    call: TaggedCall
    is_stream: bool

    def sending(self) -> AbstractContextManager[None]:
        """Keep the layers below from tagging again while the block runs."""
        return bound(_in_openai_request, True)

    def answered(self, response: Any) -> Any:
        """Read the figures of an answer, now or when its stream ends; returns the answer."""
        with fail_open:
            if self.is_stream:
                self._follow(response)
            else:
                self.call.answer = _content(response)
        if not self.is_stream:
            self.call.finish()
        return response

    def _follow(self, response: Any) -> None:
        stream = response.parse() if _is_raw(response) else response
        items = getattr(stream, "_iterator", None)
        if isinstance(items, AsyncIterator):
            stream._iterator = _followed_async(items, self.call)
        elif isinstance(items, Iterator):
            stream._iterator = _followed(items, self.call)
        else:  # the bytes are the user's to read
            self.call.finish()
            return
        stream.close = _closing(stream.close, self.call)


def _is_raw(response: object) -> bool:
    return type(response).__name__ == "LegacyAPIResponse"


def _content(response: Any) -> object:
    if not _is_raw(response):
        return response
    # Not `response.parse()`: the client's own parsers may raise there, and that is for the user to see.
    return json.loads(response.http_response.content)


def _followed(items: Iterator[Any], call: TaggedCall) -> Iterator[Any]:
    try:
        for item in items:
            _note(item, call)
            yield item
    except Exception:
        call.fail()
        raise
    finally:
        call.finish()


async def _followed_async(items: AsyncIterator[Any], call: TaggedCall) -> AsyncIterator[Any]:
    try:
        async for item in items:
            _note(item, call)
            yield item
    except Exception:
        call.fail()
        raise
    finally:
        call.finish()


def _closing(close: Callable[[], Any], call: TaggedCall) -> Callable[[], Any]:
    """A stream's own `close`, sync or async, after which the call is counted though its end was not read."""

    @functools.wraps(close)
    def closed() -> Any:
        call.finish()
        return close()

    return closed


def _note(item: Any, call: TaggedCall) -> None:
    with fail_open:
        if (telling := _telling(item)) is not None:
            call.answer = telling


def _telling(item: Any) -> Any:
    """The part of a chunk or event that holds figures, or None."""
    if says_anything(item):
        return item
    response = getattr(item, "response", None)  # an event of the responses API
    return response if response is not None and says_anything(response) else None


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
        owners = hook_points()
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

    def _opened(self, client: Any, options: Any, *, is_stream: bool) -> OpenCall | None:
        opened = None
        if self.is_active:
            with fail_open:
                opened = open_call(client, options, is_stream=is_stream)
        return opened

    def _sync_patch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def request(client: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
            opened = self._opened(client, options, is_stream=bool(kwargs.get("stream")))
            if opened is None:
                return original(client, cast_to, options, *args, **kwargs)
            with opened.call.failing(), opened.sending():
                response = original(client, cast_to, opened.options, *args, **kwargs)
            return opened.answered(response)

        return request

    def _async_patch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        async def request(client: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
            opened = self._opened(client, options, is_stream=bool(kwargs.get("stream")))
            if opened is None:
                return await original(client, cast_to, options, *args, **kwargs)
            with opened.call.failing(), opened.sending():
                response = await original(client, cast_to, opened.options, *args, **kwargs)
            return opened.answered(response)

        return request


def open_call(client: Any, options: Any, *, is_stream: bool) -> OpenCall | None:
    """Tag a copy of a request's options.

    Args:
        client: of the openai package.
        options: its `FinalRequestOptions`; not changed.
        is_stream: whether the answer is to be a stream.

    Returns:
        None if this request gets no tags.
    """
    body = options.json_data
    if not isinstance(body, dict) or not is_llm_request(options.url):
        return None
    extra = options.extra_json or {}
    url = options.url if "://" in options.url else str(client.base_url)
    call = tag_call(url, {**body, **extra} if extra else body)
    if call is None:
        return None
    update: dict[str, Any] = {"extra_json": {**extra, XARGS_KEY: call.xargs}}
    if call.headers:
        update["headers"] = {**call.headers, **(options.headers or {})}  # the user's own win
    return OpenCall(options.model_copy(update=update), call, is_stream)


def hook_points() -> tuple[type, type] | None:
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
