"""Fixtures for more than one test file. Nothing here imports vLLM before a test asks for it."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator

import pytest
from tests.openai_server import OpenAIServer, running_server
from tests.vllm_lab import Lab, PlainEngine


@pytest.fixture(scope="session")
def require_vllm() -> None:
    """Skip a test where vLLM is missing; in CI that is a failure."""
    if importlib.util.find_spec("vllm") is None:
        if os.environ.get("CI"):
            pytest.fail("vLLM is not installed")
        pytest.skip("vLLM is not installed")


@pytest.fixture
def numba(require_vllm: None) -> None:
    """Let a test use vLLM's n-gram drafter; see `pytest_collection_modifyitems`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests with numba last: vLLM's CPU kernels can't be registered once its compiler, llvmlite, is loaded."""
    items.sort(key=lambda item: "numba" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def model_path(require_vllm: None) -> str:
    """Folder of the small model; made the first time."""
    from agentspec.benchmarks.models import ModelError, resolve_model  # noqa: PLC0415  # needs the bench extra

    try:
        return resolve_model(None)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no model: {error}")


@pytest.fixture(scope="session")
def plain_engine(model_path: str) -> Iterator[PlainEngine]:
    """vLLM without any speculative configuration: what every output is compared with."""
    engine = PlainEngine(model_path)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def session_lab(model_path: str) -> Iterator[Lab]:
    lab = Lab(model_path)
    yield lab
    lab.shutdown()
    assert not lab.scheduler._client._thread.is_alive()


@pytest.fixture
def lab(session_lab: Lab) -> Iterator[Lab]:
    """vLLM with the scheduler hook and an empty draft engine; the test may put another client in its place."""
    session_lab.use(session_lab.new_client())
    yield session_lab
    session_lab.settle()


@pytest.fixture(scope="module")
def module_server() -> Iterator[OpenAIServer]:
    """A server of OpenAI's API for all tests of a module."""
    with running_server() as server:
        yield server


@pytest.fixture
def server(module_server: OpenAIServer) -> OpenAIServer:
    """The same, without what earlier tests have sent."""
    module_server.clear()
    return module_server


@pytest.fixture
def agentspec_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What we log; vLLM keeps its logger tree from the root logger once it is imported."""
    logger = logging.getLogger("vllm.agentspec")
    logger.addHandler(caplog.handler)
    is_propagated, logger.propagate = logger.propagate, False
    with caplog.at_level(logging.INFO, logger.name):
        yield caplog
    logger.propagate = is_propagated
    logger.removeHandler(caplog.handler)
