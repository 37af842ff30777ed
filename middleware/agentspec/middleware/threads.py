"""Opt-in: threads that a node starts by itself belong to the run that started them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from agentspec.middleware.caller import current_caller
from agentspec.middleware.fail_open import fail_open

_originals: dict[type, tuple[str, Callable[..., Any], Callable[..., Any]]] = {}  # owner -> method, original, patch
_lock = threading.Lock()
_state = {"is_active": False}


def instrument_threads() -> None:
    """Let threads started inside wrapped graphs run in a copy of the context that started them; idempotent.

    Covers `threading.Thread`, `ThreadPoolExecutor.submit` and `map`, and so `loop.run_in_executor`. Threads started
    elsewhere are left alone. LangChain's own pools and `asyncio.to_thread` need none of it.
    """
    with _lock:
        for owner, method, patched in (
            (ThreadPoolExecutor, "submit", _submit),
            (threading.Thread, "start", _start),
        ):
            if owner not in _originals:
                original = getattr(owner, method)
                patch = patched(original)
                _originals[owner] = method, original, patch
                setattr(owner, method, patch)
        _state["is_active"] = True


def uninstrument_threads() -> None:
    """Leave new threads alone again. Idempotent."""
    with _lock:
        _state["is_active"] = False
        for owner, (method, original, patch) in list(_originals.items()):
            if getattr(owner, method) is patch:  # else another patch lies over ours, which then passes all through
                setattr(owner, method, original)
                del _originals[owner]


def _carried(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` in a copy of this context, if a wrapped graph runs here."""
    carried = run
    if _state["is_active"]:
        with fail_open:
            if current_caller() is not None:
                carried = functools.partial(copy_context().run, run)
    return carried


def _submit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def submit(pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return original(pool, _carried(fn), *args, **kwargs)

    return submit


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(thread: threading.Thread) -> None:
        # A pool's worker outlives the run that happened to start it; its tasks carry their own contexts.
        if not _is_pool_worker(thread):
            carried = _carried(thread.run)
            if carried != thread.run:
                thread.run = carried  # type: ignore[method-assign]  # of this one thread
        original(thread)

    return start


def _is_pool_worker(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", None) == "concurrent.futures.thread"
