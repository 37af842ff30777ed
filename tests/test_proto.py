"""The wire contract: its generated code is fresh, loads on the oldest and newest protobuf, and bends no lint rule."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PROTO = PROJECT / "proto"
CONTRACT = PROTO / "agentspec/draft/v1"
MODULES = [f"agentspec.draft.v1.{name}" for name in ("draft_pb2", "draft_pb2_grpc", "history_pb2", "history_pb2_grpc")]


@pytest.fixture(scope="module")
def tools() -> Path:
    """The folder of the programs that generate and lint, at the versions that the Makefile pins."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = subprocess.run(
        ["make", "--silent", "build/proto/tools"],
        cwd=PROJECT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        reason = f"grpcio-tools and buf cannot be installed: {made.stderr[-300:]}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return PROJECT / "build/proto/bin"


def contract_files() -> list[str]:
    return sorted(str(path) for path in CONTRACT.glob("*.proto"))


def test_the_committed_code_is_what_the_generator_makes(tools: Path, tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]

    subprocess.run([tools / "python", "-m", "grpc_tools.protoc", f"-I{PROTO}", *outputs, *contract_files()], check=True)

    made = {path.name: path.read_text() for path in (tmp_path / "agentspec/draft/v1").iterdir()}
    assert made == {
        path.name: path.read_text() for path in CONTRACT.iterdir() if "_pb2" in path.name and path.is_file()
    }


def broken_fields(tools: Path, contract: Path) -> tuple[int, str]:
    command = [str(tools / "buf"), "breaking", str(contract), "--against", str(PROTO / "released.binpb")]
    compared = subprocess.run(command, capture_output=True, text=True, check=False)
    return compared.returncode, compared.stdout + compared.stderr


def test_the_contract_still_serves_the_clients_of_the_last_release(tools: Path) -> None:
    assert (0, "") == broken_fields(tools, PROTO)


def test_a_field_with_another_number_would_break_them(tools: Path, tmp_path: Path) -> None:
    changed = tmp_path / "proto"
    shutil.copytree(PROTO, changed)
    file = changed / "agentspec/draft/v1/draft.proto"
    file.write_text(file.read_text().replace("bytes handles = 2;", "bytes handles = 99;"))

    code, message = broken_fields(tools, changed)

    assert 0 != code
    assert "handles" in message


def test_the_contract_bends_no_lint_rule(tools: Path) -> None:
    linted = subprocess.run([tools / "buf", "lint", PROTO], capture_output=True, text=True, check=False)

    assert ("", 0) == (linted.stdout + linted.stderr, linted.returncode)


def test_the_code_loads_on_the_oldest_protobuf_without_a_warning(tools: Path) -> None:
    program = f"import google.protobuf as p, {', '.join(MODULES)}; print(p.__version__)"

    loaded = subprocess.run(
        [tools / "python", "-W", "error", "-c", program],
        env={"PYTHONPATH": str(PROTO)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "") == (loaded.returncode, loaded.stderr)
    assert loaded.stdout.startswith("5.29.")


@pytest.mark.parametrize("name", MODULES)
def test_the_code_loads_on_the_installed_protobuf_without_a_warning(name: str) -> None:
    loaded = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", f"import {name}"],
        env={"PYTHONPATH": str(PROTO)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "") == (loaded.returncode, loaded.stderr)


def test_a_step_brings_every_value_of_the_seam() -> None:
    """A field that the engine learns to use must cross the wire too; `client_id` is the stream's own."""
    from agentspec.sidecar.engine import StepDrafts, StepRequest, StepTiming  # noqa: PLC0415 - needs the built core

    wire = importlib.import_module("agentspec.draft.v1.draft_pb2")

    for seam, message in ((StepRequest, wire.Step), (StepTiming, wire.StepTiming), (StepDrafts, wire.StepDrafts)):
        ours = {*seam.__dataclass_fields__} - {"client_id"}
        assert ours == set(message.DESCRIPTOR.fields_by_name)


def test_every_array_states_its_element_type_and_length() -> None:
    array = re.compile(
        r"^ +bytes \w+(?:ids|handles|positions|offsets|tokens|lengths|survival|redundancy) = \d+; // (.*)$"
    )
    comments = [
        found[1]
        for path in contract_files()
        for line in Path(path).read_text().splitlines()
        if (found := array.match(line))
    ]

    assert len(comments) > 10
    assert [] == [comment for comment in comments if not re.match(r"(u?int32|int64|float32)\[.+\]", comment)]
