"""A local server that answers OpenAI chat completions, anything else by an empty object, and keeps every body."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentspec.sidecar.tags import Tags, decode_tags

Body = dict[str, Any]


class OpenAIServer(ThreadingHTTPServer):
    """Answers every chat completion, by a tool call where tools are offered and no result is in yet."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ChatHandler)
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.drafting: Body | None = None
        self.num_failures_left = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Base URL for a client."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def clear(self) -> None:
        """Forget what was asked so far."""
        self.bodies.clear()
        self.headers.clear()
        self.drafting = None
        self.num_failures_left = 0

    @property
    def tags(self) -> list[Tags]:
        """The tags of every request, as the engine decodes them."""
        return [decode_tags(body.get("vllm_xargs")) for body in self.bodies]

    @property
    def sent(self) -> list[Body]:
        """The JSON under `agentspec` of every request, as it was sent."""
        return [json.loads(body["vllm_xargs"]["agentspec"]) for body in self.bodies]

    def take(self, body: Body, headers: dict[str, str]) -> bool:
        """Keep a request; False if it is to fail."""
        with self.lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.num_failures_left -= 1
            return self.num_failures_left < 0


class _ChatHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OpenAIServer

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.server.take(body, {name.lower(): value for name, value in self.headers.items()}):
            self._send(500, "application/json", json.dumps({"error": {"message": "asked to fail"}}))
        elif not self.path.endswith("/chat/completions"):
            self._send(200, "application/json", json.dumps(self._other(body)))
        elif body.get("stream"):
            events = _events(body, self._metrics())
            self._send(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events))
        else:
            self._send(200, "application/json", json.dumps({**_completion(body), **self._metrics()}))

    def _metrics(self) -> Body:
        return {"metrics": {"speculative_decoding": self.server.drafting}} if self.server.drafting else {}

    def _other(self, body: Body) -> Body:
        if not self.path.endswith("/responses"):
            return {}
        usage = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
        return {"id": "r", "object": "response", "model": body["model"], "output": [], "usage": usage}

    def _send(self, status: int, content_type: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _example(schema: Body) -> str:
    properties: dict[str, Body] = schema.get("properties", {})
    return json.dumps({name: _value(spec) for name, spec in properties.items()})


def _value(spec: Body) -> Any:
    if "enum" in spec:
        return spec["enum"][0]
    return {"integer": 1, "array": []}.get(spec.get("type", ""), "x")


def _called_tool(body: Body) -> Body | None:
    tools: dict[str, Body] = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    choice = body.get("tool_choice")
    if not tools or choice == "none" or body["messages"][-1]["role"] == "tool":
        return None
    return tools[choice["function"]["name"]] if isinstance(choice, dict) else next(iter(tools.values()))


def _message(body: Body) -> Body:
    if (tool := _called_tool(body)) is not None:
        call = {"name": tool["name"], "arguments": _example(tool["parameters"])}
        calls = [{"id": "call-1", "index": 0, "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    schema = (body.get("response_format") or {}).get("json_schema")
    return {"role": "assistant", "content": _example(schema["schema"]) if schema else "an answer"}


def _envelope(body: Body, kind: str, **choice: Any) -> Body:
    choices = [{"index": 0, "finish_reason": None, **choice}]
    return {"id": "chatcmpl-1", "created": 0, "model": body["model"], "object": kind, "choices": choices}


def _completion(body: Body) -> Body:
    message = _message(body)
    reason = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {**_envelope(body, "chat.completion", message=message, finish_reason=reason), "usage": usage}


def _events(body: Body, metrics: Body) -> Iterator[str]:
    message = _message(body)
    reason = "tool_calls" if "tool_calls" in message else "stop"
    yield json.dumps(_envelope(body, "chat.completion.chunk", delta=message))
    yield json.dumps(_envelope(body, "chat.completion.chunk", delta={}, finish_reason=reason))
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        yield json.dumps({**_envelope(body, "chat.completion.chunk"), "choices": [], "usage": usage, **metrics})
    yield "[DONE]"


@contextmanager
def running_server() -> Iterator[OpenAIServer]:
    """Run a server on a free port while the block runs."""
    server = OpenAIServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
