"""The life of a draft server as a process: start, refusals, drain, crash, and who else wants its socket."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.sidecar_lab import (
    ANSWER_S,
    START_S,
    Stream,
    clean_environment,
    open_message,
    running_sidecar,
    serve_command,
    step_message,
)

from agentspec.draft.v1 import draft_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
DRAFT_SERVICE = "agentspec.draft.v1.DraftService"


def ended(path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    return subprocess.run(
        serve_command(path, *flags),
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health_of(channel: grpc.Channel, service: str) -> int:
    stub: Any = HealthStub(channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=ANSWER_S).status)


# --- the socket ---


def test_a_missing_folder_is_made_for_the_group(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "run" / "agentspec" / "draft.sock") as server:
        assert 0o2770 == stat.S_IMODE(server.socket.parent.stat().st_mode)
        assert 0o660 == stat.S_IMODE(server.socket.stat().st_mode)
        assert [] == [line for line in server.events if line["event"] == "socket_folder_mode_unexpected"]


def test_an_existing_folder_is_used_as_it_is_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    with running_sidecar(folder / "draft.sock") as server:
        warning = server.wait_for("socket_folder_mode_unexpected")

        assert ("0o700", "0o2770") == (warning["mode"], warning["expected"])
        assert 0o700 == stat.S_IMODE(folder.stat().st_mode)


def test_a_second_server_on_a_path_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock") as server:
        second = ended(server.socket)

        assert 1 == second.returncode
        assert f"pid {server.process.pid}" in second.stderr
        assert server.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_S).boot_id


def test_what_a_killed_server_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "draft.sock"
    with running_sidecar(path) as first:
        boot_id = first.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_S).boot_id
        first.kill()
    assert path.is_socket()

    with running_sidecar(path) as second:
        assert boot_id != second.stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_S).boot_id


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")

    process = ended(path)

    assert (2, "mine") == (process.returncode, path.read_text())
    assert "'socket'" in process.stderr


def test_a_path_that_is_too_long_is_refused_by_name(tmp_path: Path) -> None:
    process = ended(tmp_path / ("x" * 120))

    assert 2 == process.returncode
    assert "'socket': expected a path of at most 107 bytes" in process.stderr


# --- configuration ---


def test_checking_a_configuration_prints_it_and_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "draft.sock"
    process = ended(path, "--check-config", "--history-bytes", "2GiB")

    assert 0 == process.returncode
    assert (str(path), 2 << 30) == (json.loads(process.stdout)["socket"], json.loads(process.stdout)["history_bytes"])
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "environment", "option"),
    [
        (["--history-bytes", "many"], {}, "history_bytes"),
        (["--history-bytes", "0"], {}, "history_bytes"),
        (["--namespace-bytes", "2GiB"], {}, "namespace_bytes"),
        (["--stored-tokens-per-s", "0"], {}, "stored_tokens_per_s"),
        (["--num-speculative-tokens", "65"], {}, "num_speculative_tokens"),
        ([], {"AGENTSPEC_METRICS_PORT": "http"}, "metrics_port"),
        (["--tcp", "0.0.0.0:50051"], {}, "tls_cert"),
        (["--tls-cert", "x.pem"], {}, "tcp"),
        (["--tcp", "nowhere"], {}, "tcp"),
        (["--grammars-dir", "/nonexistent"], {}, "grammars_dir"),
        (["--config", "/nonexistent.toml"], {}, "config"),
    ],
)  # fmt: skip
def test_a_wrong_option_ends_the_program_with_its_name(
    tmp_path: Path, flags: list[str], environment: dict[str, str], option: str
) -> None:
    command = [word for word in serve_command(tmp_path / "draft.sock") if word not in ("--metrics-port", "0")]
    process = subprocess.run(
        [*command, "--check-config", *flags],
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )

    assert 2 == process.returncode
    assert f"agentspec option '{option}'" in process.stderr


def test_a_port_that_is_taken_ends_the_program_with_its_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))  # noqa: S104 - the port is to be taken on all addresses
        taken.listen()
        process = ended(tmp_path / "draft.sock", "--health-port", str(taken.getsockname()[1]))

    assert 2 == process.returncode
    assert "agentspec option 'health_port': cannot listen on" in process.stderr


# --- health and reflection ---


def test_the_draft_service_is_healthy_before_any_model_is_known(tmp_path: Path) -> None:
    port = free_port()
    with running_sidecar(tmp_path / "draft.sock", "--health-port", str(port)) as server:
        assert SERVING == health_of(server.channel(), DRAFT_SERVICE)
        assert SERVING == health_of(server.channel(), "")

        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert SERVING == health_of(channel, DRAFT_SERVICE)
            drafting: Any = channel.unary_unary(f"/{DRAFT_SERVICE}/GetServerInfo")
            with pytest.raises(grpc.RpcError) as raised:
                drafting(b"", timeout=ANSWER_S)
            assert grpc.StatusCode.UNIMPLEMENTED == raised.value.code()


def test_reflection_lists_the_services(tmp_path: Path) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool  # noqa: PLC0415
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # noqa: PLC0415
        ProtoReflectionDescriptorDatabase,
    )

    with running_sidecar(tmp_path / "draft.sock") as server:
        database = ProtoReflectionDescriptorDatabase(server.channel())
        method = DescriptorPool(database).FindServiceByName(DRAFT_SERVICE).FindMethodByName("Draft")

        assert DRAFT_SERVICE in database.get_services()
        assert "agentspec.draft.v1.DraftRequest" == method.input_type.full_name


# --- the end ---


def test_a_termination_drains_streams_and_removes_the_socket(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock") as server:
        stream = Stream(server.registered())
        stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, [1])}))

        assert 0 == server.terminate()

        with pytest.raises(grpc.RpcError) as raised:
            stream.receive()
        assert (grpc.StatusCode.UNAVAILABLE, "the server is draining; try again") == (
            raised.value.code(),
            raised.value.details(),
        )
        assert not server.socket.exists()
        assert [1] == [line["num_streams"] for line in server.events if line["event"] == "drain_started"]
