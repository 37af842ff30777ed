"""The README's client runs as it stands there, and a client that knows nothing but reflection can ask for anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.sidecar_lab import ANSWER_S, FINGERPRINT, START_S, SidecarProcess, running_sidecar

PROJECT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"<!-- runs in tests/test_sidecar_readme.py -->\n```python\n(.*?)```", re.DOTALL)
REFLECTED = re.compile(r"grpcurl -plaintext -unix draft.sock (?:-d '(.*)' )?([\w.]+)/(\w+)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("readme") / "draft.sock", "--max-models", "2") as server:
        server.registered()
        yield server


def test_the_readmes_client_gets_the_draft_that_it_promises(server: SidecarProcess) -> None:
    (code,) = EXAMPLE.findall((PROJECT / "README.md").read_text())
    (promise,) = re.findall(r"print\(.*  # (b'.*')\n", code)

    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=server.socket.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )

    assert (f"{promise}\n", 0) == (ran.stdout, ran.returncode), ran.stderr


def test_a_client_with_reflection_alone_asks_in_json(server: SidecarProcess) -> None:
    channel = server.channel()
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def ask(service: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
        found = pool.FindServiceByName(service).FindMethodByName(method)
        call: Any = channel.unary_unary(
            f"/{service}/{method}", response_deserializer=GetMessageClass(found.output_type).FromString
        )
        message = ParseDict(request, GetMessageClass(found.input_type)())
        answer: dict[str, Any] = MessageToDict(call(message.SerializeToString(), timeout=ANSWER_S))
        return answer

    asked = REFLECTED.findall((PROJECT / "README.md").read_text())
    assert ["GetServerInfo", "GetStats"] == [method for _, _, method in asked]
    answers = [ask(service, method, _parsed(request)) for request, service, method in asked]

    assert FINGERPRINT in [model["modelFingerprint"] for model in answers[0]["models"]]
    assert FINGERPRINT in [model["modelFingerprint"] for model in answers[1]["models"]]


def _parsed(request: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(request or "{}")
    return parsed
