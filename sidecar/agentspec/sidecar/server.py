"""The draft server: its listeners, its life from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from agentspec.draft.v1 import draft_pb2, history_pb2
from agentspec.sidecar.callers import Callers
from agentspec.sidecar.draft_service import DraftService
from agentspec.sidecar.grammars import Grammar
from agentspec.sidecar.history_service import HistoryService
from agentspec.sidecar.options import OptionsError
from agentspec.sidecar.rpc import Calls
from agentspec.sidecar.served_models import ServedModels
from agentspec.sidecar.server_metrics import register_server
from agentspec.sidecar.server_options import ServerOptions
from agentspec.sidecar.socket_file import socket_umask
from agentspec.sidecar.store.metrics import register_store
from agentspec.sidecar.telemetry import METER_NAME, export_metrics, resource
from agentspec.sidecar.tls import Certificates
from agentspec.sidecar.tracing import Tracing

log = structlog.get_logger()

HOUSEKEEPING_S = 10.0
REDIS_HEALTH_S = 1.0
REDIS_SERVICE = "redis"
"""Health of the shared histories: for operators; the server drafts without them."""
DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
HISTORY_SERVICE = history_pb2.DESCRIPTOR.services_by_name["HistoryService"].full_name


class DraftServer:
    """A server on a socket, and on TCP if the options say so.

    Args:
        options: complete and checked.
        grammars: of the server, by id.
        certificates: for TCP; None: no TCP.
    """

    def __init__(self, options: ServerOptions, grammars: dict[str, Grammar], certificates: Certificates | None) -> None:
        self._options = options
        self._certificates = certificates
        self._callers = Callers(options.namespace, options.tls_identities)
        self._tracing = Tracing()
        if options.otlp_endpoint:
            self._tracing = Tracing.to_collector(options.otlp_endpoint, resource())
        self._calls = Calls(self._callers, int(options.max_message_bytes), self._tracing)
        self.models = ServedModels(options, grammars, roots=self._callers.namespaces)
        self._health = HealthServicer()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Ask `serve` to drain and return."""
        self._stop.set()

    async def serve(self, socket: Path) -> None:
        """Serve until `stop`, then drain: streams end when the message at hand is answered.

        Raises:
            OptionsError: an address can't be had; names the option.
        """
        async with contextlib.AsyncExitStack() as stack:
            grpc_server = self._grpc_server()
            with socket_umask():
                _bind("socket", f"unix:{socket}", grpc_server.add_insecure_port)
            tcp_port = self._bind_tcp(grpc_server)
            health_server, health_port = self._health_server()
            self._export_metrics(stack)
            stack.callback(self._tracing.shutdown)
            stack.push_async_callback(asyncio.to_thread, self.models.shutdown)
            for service in ("", DRAFT_SERVICE, HISTORY_SERVICE):
                await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
            await grpc_server.start()
            if health_server:
                await health_server.start()
            await stack.enter_async_context(_repeated(self._keep_house, HOUSEKEEPING_S))
            if self._options.redis is not None:
                await stack.enter_async_context(_repeated(self._tell_redis_health, REDIS_HEALTH_S))
            log.info(
                "server_started",
                socket=str(socket),
                tcp_port=tcp_port,
                health_port=health_port,
                metrics_port=self._options.metrics_port,
                namespace=self._options.namespace,
                boot_id=self.models.boot_id,
            )
            await self._stop.wait()
            log.info("drain_started", num_streams=self.models.num_streams())
            await self._health.enter_graceful_shutdown()
            await self._calls.drain(self._options.drain_s)
            await grpc_server.stop(self._options.drain_s)
            if health_server:
                await health_server.stop(None)
            log.info("server_stopped")

    def _grpc_server(self) -> grpc.aio.Server:
        size = int(self._options.max_message_bytes)
        server = grpc.aio.server(
            maximum_concurrent_rpcs=self._options.max_calls,
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                *_LISTENER,
            ],
        )
        drafts = DraftService(self.models, self._calls, self._options, self._tracing)
        histories = HistoryService(self.models, self._calls, self._options)
        server.add_generic_rpc_handlers((drafts.handler(), histories.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(_reflected(), server)
        return server

    def _bind_tcp(self, server: grpc.aio.Server) -> int | None:
        address, certificates = self._options.tcp, self._certificates
        if address is None or certificates is None:
            return None
        return _bind("tcp", address, lambda to: server.add_secure_port(to, certificates.credentials()))

    def _health_server(self) -> tuple[grpc.aio.Server | None, int | None]:
        if not self._options.health_port:
            return None, None
        server = grpc.aio.server(maximum_concurrent_rpcs=64, options=_LISTENER)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server, _bind("health_port", f"[::]:{self._options.health_port}", server.add_insecure_port)

    async def _keep_house(self) -> None:
        self.models.keep_house()

    async def _tell_redis_health(self) -> None:
        seen = self.models.store_figures()
        is_serving = seen is not None and seen.is_connected and seen.is_ready
        status = health_pb2.HealthCheckResponse
        await self._health.set(REDIS_SERVICE, status.SERVING if is_serving else status.NOT_SERVING)

    def _export_metrics(self, stack: contextlib.AsyncExitStack) -> None:
        port, endpoint = self._options.metrics_port, self._options.otlp_endpoint
        if port or endpoint:
            export = export_metrics(self.models, self.models.fallbacks, port, endpoint)
            meter = export.provider.get_meter(METER_NAME)
            register_server(meter, self.models.num_streams, self._calls.refusals)
            if self._options.redis is not None:
                register_store(meter, self.models.store_figures)
            stack.callback(export.shutdown)


# Two servers must not share a port; a client that hangs or whose machine is gone is noticed within 40 s.
_LISTENER: Sequence[tuple[str, int]] = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


def _reflected() -> Sequence[str]:
    return (
        DRAFT_SERVICE,
        HISTORY_SERVICE,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )


def _bind(option: str, address: str, add_port: Callable[[str], int]) -> int:
    try:
        port = add_port(address)
    except RuntimeError as error:
        raise OptionsError(f"agentspec option {option!r}: cannot listen on {address}: {error}") from None
    if not port:
        raise OptionsError(f"agentspec option {option!r}: cannot listen on {address}")
    return port


@contextlib.asynccontextmanager
async def _repeated(call: Callable[[], Awaitable[None]], interval_s: float) -> AsyncIterator[None]:
    async def run() -> None:
        while True:
            await call()
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def run_server(
    options: ServerOptions, socket: Path, grammars: dict[str, Grammar], certificates: Certificates | None
) -> None:
    """Serve until SIGTERM or SIGINT; see `DraftServer.serve`."""
    server = DraftServer(options, grammars, certificates)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.serve(socket)
