"""The admin call of the metrics port: which policy is in use, and another one from the next step on."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from typing import Protocol
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from agentspec.sidecar.budget import POLICIES, Policy

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

POLICY_PATH = "/policy"
_MAX_BODY = 64  # bytes; the longest name is far shorter


class SwitchedEngine(Protocol):
    """What the call needs of a draft engine."""

    @property
    def policy(self) -> Policy:
        """Which draft tokens are verified."""
        ...

    def set_policy(self, policy: Policy) -> None:
        """Verify other draft tokens from the next step on; an unknown policy raises ValueError."""
        ...


def with_policy_switch(app: WSGIApplication, engine: SwitchedEngine) -> WSGIApplication:
    """Answer `/policy`, and leave every other path to `app`.

    ``GET`` answers the name of the policy. ``PUT`` takes one as its body; only from this machine (a loopback address),
    because the port itself is open to whoever may scrape it.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != POLICY_PATH:
            return app(environ, start_response)
        status, text = _answer(environ, engine)
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if status.startswith("405"):
            headers.append(("Allow", "GET, PUT"))
        start_response(status, headers)
        return [f"{text}\n".encode()]

    return answer


def _answer(environ: WSGIEnvironment, engine: SwitchedEngine) -> tuple[str, str]:
    method = environ["REQUEST_METHOD"]
    if method == "GET":
        return "200 OK", engine.policy
    if method != "PUT":
        return "405 Method Not Allowed", f"expected GET or PUT, got {method}"
    caller = environ.get("REMOTE_ADDR", "")
    if not _is_loopback(caller):
        return "403 Forbidden", f"the policy is switched from the machine of the engine alone, not from {caller}"
    asked = _read_body(environ)
    found = next((policy for policy in POLICIES if policy == asked), None)
    if found is None:
        return "400 Bad Request", f"policy: expected one of {', '.join(POLICIES)} as the body, got {asked[:20]!r}"
    before = engine.policy
    engine.set_policy(found)
    logger.info("agentspec: policy=%s, was %s, by PUT %s", found, before, POLICY_PATH)
    return "200 OK", found


def _read_body(environ: WSGIEnvironment) -> str:
    length = environ.get("CONTENT_LENGTH") or "0"
    size = min(int(length), _MAX_BODY) if length.isdecimal() else 0
    return bytes(environ["wsgi.input"].read(size)).decode(errors="replace").strip()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
