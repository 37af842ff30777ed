"""What `agentspec-vllm doctor` looks at before an engine starts: each finding says what was found and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from agentspec.sidecar.grammars import preset_name
from agentspec.sidecar.options import Options

from .compat import PLUGIN_GROUP, CompatibilityError, check_installed, check_version
from .compat_v2 import check_v2
from .hook_choice import choose_hook
from .model_reader import read_model

PLUGIN_NAME = "agentspec"
PLUGINS_VARIABLE = "VLLM_PLUGINS"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        subject: what was checked.
        status: `fail` means that the engine will not start or not draft.
        detail: what was found.
        fix: what to do; empty when all is well.
    """

    subject: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def examine(options: Options, model: str = "", environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check this machine for an engine with `options`; the slow checks, which import vLLM, come last.

    Args:
        options: of the engine that is to start.
        model: hub id or folder; without one the tokenizer is not looked at.
        environ: where ``VLLM_PLUGINS`` is.
    """
    yield check_namespace()
    yield check_port(options.metrics_port)
    if options.mode != "embedded":
        yield check_sidecar(options)
    if options.redis is not None:
        yield check_redis(options)
    yield check_plugin(environ)
    choice = choose_hook(options.hook, environ)
    yield Finding("hook", "ok", f"{choice.name} ({choice.reason}): {choice.price}")
    version = _check("vllm", check_version)
    yield version
    if version.status == "ok":
        yield _check("vllm's scheduler", check_installed) if choice.name == "v1" else _check("vllm's runner", check_v2)
        if model:
            yield check_model(model)


def check_namespace() -> Finding:
    """Look for another distribution's package that hides ours: one with an ``agentspec/__init__.py``."""
    spec = importlib.util.find_spec("agentspec")
    if spec is not None and spec.origin is not None:
        return Finding(
            "package agentspec",
            "fail",
            f"{spec.origin} is another project's package and hides ours",
            "uninstall that distribution, or use an environment of its own",
        )
    return Finding("package agentspec", "ok", "not hidden by another project")


def check_port(port: int) -> Finding:
    """Look whether the metrics port is free."""
    if port == 0:
        return Finding("metrics port", "warn", "metrics are off", "set the option metrics_port")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return Finding(
                "metrics port",
                "warn",
                f"{port}: {error.strerror}; the engine would start without metrics",
                "set the option metrics_port, or stop what listens there",
            )
    return Finding("metrics port", "ok", str(port))


def check_sidecar(options: Options) -> Finding:
    """Ask the draft server who it is."""
    from .sidecar_link import Link, LinkError  # noqa: PLC0415  # imports grpc, 0.2 s

    path = options.socket
    until = "serves without drafts" if options.mode == "sidecar" else "drafts from its own history alone"
    fix = f"start it with `agentspec-sidecar serve --socket {path}`; until then the engine {until}"
    try:
        link = Link(path)
    except LinkError as error:
        return Finding("draft server", "warn", str(error), fix)
    try:
        server = link.greet()
    except LinkError as error:
        return Finding("draft server", "warn", str(error), fix)
    finally:
        link.close()
    num_models = len(server.models)
    return Finding(
        "draft server", "ok", f"{path}: version {server.version}, {num_models} model{'s' * (num_models != 1)}"
    )


def check_redis(options: Options) -> Finding:
    """Look whether the Redis answers that shares the histories."""
    from agentspec.sidecar.store.connection import FAILURES, connect  # noqa: PLC0415  # imports redis, 0.2 s
    from agentspec.sidecar.store.deletion import read_epochs  # noqa: PLC0415  # see above

    address = options.redis_address()
    if address is None:
        return Finding("redis", "ok", "histories are not shared")
    fix = "the engine serves without it and tries again; look at its address, its ACL and its certificates"
    try:
        client = connect(options, address)
        try:
            read_epochs(client)
        finally:
            client.close()
    except FAILURES as error:
        return Finding("redis", "warn", f"{address}: {type(error).__name__}: {error:.200}", fix)
    return Finding("redis", "ok", f"{address} answers")


def check_plugin(environ: Mapping[str, str]) -> Finding:
    """Look whether vLLM will load our plug-in, which serves `min_p` and `logit_bias` and mends sampling on CPUs."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    allowed = environ.get(PLUGINS_VARIABLE)
    if PLUGIN_NAME not in names:
        return Finding(
            "vLLM plug-in",
            "warn",
            "not installed: requests with min_p or logit_bias will be refused",
            "install agentspec-serving as a package, not as a folder on PYTHONPATH",
        )
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return Finding(
            "vLLM plug-in",
            "warn",
            f"{PLUGINS_VARIABLE}={allowed} keeps it out: requests with min_p or logit_bias will be refused",
            f"add {PLUGIN_NAME} to {PLUGINS_VARIABLE}",
        )
    return Finding("vLLM plug-in", "ok", "installed")


def check_model(model: str) -> Finding:
    """Look which block markers the engine will follow in the output of a model."""
    try:
        vocabulary, grammar = read_model(model)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return Finding("model", "fail", f"{model}: {reason:.200}", "give a hub id, or a folder with a tokenizer")
    if not any(vocabulary):
        return Finding(
            "model",
            "warn",
            f"{model}: its tokenizer is not understood, so semantic blocks are not followed",
            "drafting works; please report the model",
        )
    return Finding("model", "ok", f"{model}: {len(vocabulary)} tokens, grammar {preset_name(grammar)}")


def _check(subject: str, check: Callable[[], object]) -> Finding:
    try:
        detail = check()
    except CompatibilityError as error:
        return Finding(subject, "fail", str(error))
    return Finding(subject, "ok", "supported" if detail is None else str(detail))
