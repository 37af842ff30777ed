"""Calls of a group stay on one replica: the shipped nginx configuration in front of two servers."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from langchain_openai import ChatOpenAI
from tests.chart import PROJECT, TOOLS
from tests.middleware_app import asking, chain_of
from tests.openai_server import OpenAIServer, running_server

from agentspec.middleware import AgentSpecMiddleware
from agentspec.middleware.calls import GROUP_HEADER

pytestmark = pytest.mark.deploy

ROUTING = PROJECT / "deploy/routing"
NUM_STAGES = 24


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running_nginx(folder: Path, ports: list[int]) -> Iterator[str]:
    """The shipped configuration with addresses of this machine; gives the base URL of its API."""
    listen = free_port()
    routing = (ROUTING / "nginx.conf").read_text()
    for number, port in enumerate(ports):
        routing = routing.replace(f"vllm-{number}.vllm:8000", f"127.0.0.1:{port}")
    routing = routing.replace("listen 8080", f"listen 127.0.0.1:{listen}")
    paths = "".join(
        f"  {name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log stderr;\nworker_processes 1;\n"
        f"events {{}}\nhttp {{\n  access_log off;\n{paths}{routing}\n}}\n"
    )
    command = [str(TOOLS / "nginx"), "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as nginx:
        try:
            wait_for(listen, nginx)
            yield f"http://127.0.0.1:{listen}/v1"
        finally:
            nginx.send_signal(signal.SIGTERM)
            nginx.wait(10)


def wait_for(port: int, process: subprocess.Popen[str]) -> None:
    """Until somebody listens, ten seconds at most."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nginx did not listen: {process.stderr.read() if process.stderr and process.poll() else ''}")


@pytest.fixture
def replicas() -> Iterator[tuple[OpenAIServer, OpenAIServer]]:
    with running_server() as first, running_server() as second:
        yield first, second


def groups_of(server: OpenAIServer) -> list[str]:
    return [headers[GROUP_HEADER] for headers in server.headers]


def ask_by_stages(url: str, num_runs: int) -> None:
    """A graph with many stages, several times, through the middleware."""
    spec = AgentSpecMiddleware(workflow_id="routing", group_header=True)
    llm = ChatOpenAI(model="m", base_url=url, api_key="x")  # type: ignore[arg-type]  # SecretStr
    graph = spec.wrap(chain_of(*((f"stage{number}", asking(llm)) for number in range(NUM_STAGES))))
    for _ in range(num_runs):
        graph.invoke({"q": "hi"})


def test_each_group_of_calls_reaches_one_replica_and_both_replicas_are_used(
    replicas: tuple[OpenAIServer, OpenAIServer], tmp_path: Path
) -> None:
    with running_nginx(tmp_path, [server.server_port for server in replicas]) as url:
        ask_by_stages(url, num_runs=3)

    first, second = map(groups_of, replicas)
    assert len(first) + len(second) == 3 * NUM_STAGES
    assert set(first).isdisjoint(second)
    assert len(set(first)) >= NUM_STAGES // 6
    assert len(set(second)) >= NUM_STAGES // 6


def test_requests_without_the_header_are_spread(replicas: tuple[OpenAIServer, OpenAIServer], tmp_path: Path) -> None:
    with running_nginx(tmp_path, [server.server_port for server in replicas]) as url:
        for _ in range(40):
            httpx.post(f"{url}/chat/completions", json={"model": "m", "messages": []}).raise_for_status()

    assert min(len(server.bodies) for server in replicas) >= 5


def test_calls_go_to_the_other_replica_when_theirs_is_gone(tmp_path: Path) -> None:
    with running_server() as alive, running_nginx(tmp_path, [alive.server_port, free_port()]) as url:
        ask_by_stages(url, num_runs=1)

        assert len(alive.bodies) == NUM_STAGES


def test_gateway_hashes_by_the_same_header() -> None:
    manifests = [*yaml.safe_load_all((ROUTING / "gateway.yaml").read_text())]

    policy = next(each for each in manifests if each["kind"] == "BackendTrafficPolicy")
    assert policy["spec"]["loadBalancer"]["consistentHash"]["header"]["name"] == GROUP_HEADER
    nginx_variable = "$http_" + GROUP_HEADER.replace("-", "_")
    assert re.search(re.escape(nginx_variable), (ROUTING / "nginx.conf").read_text())
