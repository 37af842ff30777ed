"""The draft server over TCP: whose certificates it takes, what an identity may do, and files that change meanwhile."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from click.testing import CliRunner
from tests.sidecar_lab import (
    ANSWER_S,
    FINGERPRINT,
    SidecarProcess,
    Stream,
    close_message,
    eventually,
    i32,
    ints,
    open_message,
    running_sidecar,
    step_message,
    vocabulary_parts,
)

from agentspec.draft.v1 import draft_pb2 as pb
from agentspec.draft.v1 import history_pb2
from agentspec.draft.v1.draft_pb2_grpc import DraftServiceStub
from agentspec.draft.v1.history_pb2_grpc import HistoryServiceStub
from agentspec.sidecar.__main__ import main

IDENTITIES = """
engine-a = {namespaces = ["team-a", "shared", "team-a"], history = true}
engine-b = {namespaces = ["team-b"]}
"""
ANSWER = b"the plan is to search for papers"
DENIED = grpc.StatusCode.PERMISSION_DENIED


@dataclass(slots=True)
class TcpServer:
    """A server with a TCP listener, and who signs for it."""

    process: SidecarProcess
    port: int
    authority: trustme.CA
    folder: Path

    def credentials(self, name: str | None, **certificate: Any) -> grpc.ChannelCredentials:
        """What a client of a name shows; None: nothing."""
        root = self.authority.cert_pem.bytes()
        if name is None:
            return grpc.ssl_channel_credentials(root)
        issued = self.authority.issue_cert(name, **certificate)
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        return grpc.ssl_channel_credentials(root, issued.private_key_pem.bytes(), chain)

    def channel(self, credentials: grpc.ChannelCredentials) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(f"localhost:{self.port}", credentials, options)

    def certificate(self) -> bytes:
        """The one that the server shows now, in DER."""
        client = self.authority.issue_cert("engine-a")
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        client.configure_cert(context)
        with (
            socket.create_connection(("localhost", self.port), ANSWER_S) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as tls,
        ):
            shown = tls.getpeercert(binary_form=True)
        assert shown is not None
        return shown


def write_certificate(issued: trustme.LeafCert, folder: Path) -> None:
    (folder / "key.pem").write_bytes(issued.private_key_pem.bytes())
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))


@contextmanager
def tcp_server(folder: Path) -> Iterator[TcpServer]:
    authority = trustme.CA()
    write_files(authority, folder)
    address = ["--tcp", "localhost:0", "--step-deadline-ms", "0", "--policy", "uniform"]
    with running_sidecar(folder / "run/s", *address, *tls_flags(folder)) as process:
        port = int(process.wait_for("server_started")["tcp_port"])
        process.registered()
        yield TcpServer(process, port, authority, folder)


def write_files(authority: trustme.CA, folder: Path) -> None:
    write_certificate(authority.issue_cert("localhost"), folder)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "identities.toml").write_text(IDENTITIES)


def tls_flags(folder: Path) -> list[str]:
    files = {"cert": "cert.pem", "key": "key.pem", "client-ca": "ca.pem", "identities": "identities.toml"}
    return [word for name, file in files.items() for word in (f"--tls-{name}", str(folder / file))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpServer]:
    with tcp_server(tmp_path_factory.mktemp("tcp")) as server:
        yield server


@pytest.fixture
def changing_server(tmp_path: Path) -> Iterator[TcpServer]:
    """One whose files a test may change."""
    with tcp_server(tmp_path) as server:
        yield server


def drafts(channel: grpc.Channel) -> DraftServiceStub:
    return DraftServiceStub(channel)  # type: ignore[no-untyped-call]  # generated


def histories(channel: grpc.Channel) -> Any:
    return HistoryServiceStub(channel)  # type: ignore[no-untyped-call]  # generated


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    code: grpc.StatusCode = raised.value.code()
    return code


def ask_info(channel: grpc.Channel) -> pb.GetServerInfoResponse:
    answer: pb.GetServerInfoResponse = drafts(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_S)
    return answer


def write(channel: grpc.Channel, text: bytes, namespace: str = "") -> None:
    stream = Stream(drafts(channel))
    stream.ask(opens=[open_message(1, b"Q", namespace=namespace)], step=step_message(1, {1: (0, [*text])}))
    stream.send(closes=[close_message(1, len(text))])
    stream.end()


def drafted(channel: grpc.Channel, begin: bytes, namespace: str = "") -> bytes:
    stream = Stream(drafts(channel))
    answer = stream.ask(opens=[open_message(1, b"Q", namespace=namespace)], step=step_message(1, {1: (0, [*begin])}))
    stream.end()
    return bytes(ints(answer.drafts.draft_token_ids))


def test_an_identity_drafts_in_its_namespaces_and_is_refused_in_others(server: TcpServer) -> None:
    with server.channel(server.credentials("engine-a")) as channel:
        stream = Stream(drafts(channel))
        names = ["", "shared", "team-a/narrower", "team-b", "team-a2", "default"]
        opens = [open_message(handle, namespace=name) for handle, name in enumerate(names)]
        stream.send(opens=opens, step=step_message(1, {}))

        refused = [stream.receive().error for _ in range(3)]

        assert [DENIED.value[0]] * 3 == [error.code for error in refused]
        assert ["opens[3].namespace", "opens[4].namespace", "opens[5].namespace"] == [error.field for error in refused]
        assert stream.receive().HasField("drafts")
        stream.end()


def test_no_identity_drafts_from_what_another_wrote(server: TcpServer) -> None:
    begin = ANSWER[:8]
    with (
        server.channel(server.credentials("engine-a")) as a,
        server.channel(server.credentials("engine-b")) as b,
    ):
        write(a, ANSWER)

        assert ANSWER[8:].startswith(drafted(a, begin)[:2])
        assert b"" != drafted(a, begin)
        assert b"" == drafted(a, begin, namespace="shared")
        assert b"" == drafted(b, begin)


def test_an_identity_without_the_history_role_reads_and_deletes_nothing(server: TcpServer) -> None:
    pb2, name = history_pb2, FINGERPRINT
    with server.channel(server.credentials("engine-b")) as channel:
        service = histories(channel)
        calls = [
            lambda: service.GetStats(pb2.GetStatsRequest()),
            lambda: service.ListKeys(pb2.ListKeysRequest(model_fingerprint=name)),
            lambda: service.AppendBlocks(pb2.AppendBlocksRequest(model_fingerprint=name)),
            lambda: service.DeleteNamespace(pb2.DeleteNamespaceRequest(namespace="team-b")),
            lambda: [*service.ExportHistory(pb2.ExportHistoryRequest(model_fingerprint=name))],
            lambda: service.ImportHistory(iter([pb2.ImportHistoryRequest(model_fingerprint=name)])),
        ]

        assert [DENIED] * 6 == [code_of(call) for call in calls]


def test_statistics_over_tcp_are_those_of_the_identitys_namespaces(server: TcpServer) -> None:
    stream = Stream(server.process.stub())
    stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, [*b"secret"])}))
    with server.channel(server.credentials("engine-a")) as channel:
        write(channel, ANSWER)
        block = history_pb2.Block(stage="s", token_ids=i32(*ANSWER))
        service = histories(channel)
        service.AppendBlocks(history_pb2.AppendBlocksRequest(model_fingerprint=FINGERPRINT, blocks=[block]))

        (model,) = service.GetStats(history_pb2.GetStatsRequest()).models
        keys = service.ListKeys(history_pb2.ListKeysRequest(model_fingerprint=FINGERPRINT)).keys
        names = [(key.namespace, key.stage) for key in keys]

        allowed = {"team-a", "team-a/narrower", "shared"}
        assert "team-a" in {row.namespace for row in model.blocks} <= allowed
        assert 0 == model.num_open_requests
        assert "team-a" in {name for name, _ in names} <= allowed
        assert sorted(set(names)) == sorted(names)
    stream.end()


def test_a_stream_of_another_identity_is_not_found(server: TcpServer) -> None:
    stream = Stream(server.process.stub())
    with server.channel(server.credentials("engine-b")) as channel:
        request = pb.OpenRequestsRequest(
            model_fingerprint=FINGERPRINT, client_id=stream.hello.client_id, requests=[open_message(1)]
        )

        assert grpc.StatusCode.NOT_FOUND == code_of(lambda: drafts(channel).OpenRequests(request))
    stream.end()


def test_no_one_over_tcp_makes_the_server_forget_a_model(server: TcpServer) -> None:
    with server.channel(server.credentials("engine-a")) as channel:
        code = code_of(lambda: drafts(channel).RegisterTokenizer(vocabulary_parts([b"x"], "b" * 64)))

        assert grpc.StatusCode.RESOURCE_EXHAUSTED == code
        assert [FINGERPRINT] == [model.model_fingerprint for model in ask_info(channel).models]


def test_a_name_that_the_server_does_not_know_is_denied_everything(server: TcpServer) -> None:
    with server.channel(server.credentials("engine-z")) as channel:
        assert DENIED == code_of(lambda: ask_info(channel))
        assert DENIED == code_of(lambda: Stream(drafts(channel)))


@pytest.mark.parametrize("kind", ["none", "other authority", "expired", "not yet valid"])
def test_a_client_without_a_valid_certificate_gets_no_connection(server: TcpServer, kind: str) -> None:
    now = datetime.datetime.now()
    day = datetime.timedelta(days=1)
    other = TcpServer(server.process, server.port, trustme.CA(), server.folder)
    issued = other.authority.issue_cert("engine-a")
    credentials = {
        "none": lambda: server.credentials(None),
        "other authority": lambda: grpc.ssl_channel_credentials(
            server.authority.cert_pem.bytes(), issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
        ),
        "expired": lambda: server.credentials("engine-a", not_before=now - 2 * day, not_after=now - day),
        "not yet valid": lambda: server.credentials("engine-a", not_before=now + day, not_after=now + 2 * day),
    }[kind]()
    with server.channel(credentials) as channel:
        assert grpc.StatusCode.UNAVAILABLE == code_of(lambda: ask_info(channel))

    with server.channel(server.credentials("engine-a")) as channel:
        assert ask_info(channel).boot_id


def test_a_new_certificate_is_shown_at_the_next_handshake_and_streams_go_on(changing_server: TcpServer) -> None:
    with changing_server.channel(changing_server.credentials("engine-a")) as channel:
        stream = Stream(drafts(channel))
        before = changing_server.certificate()
        write_certificate(changing_server.authority.issue_cert("localhost"), changing_server.folder)
        eventually(lambda: changing_server.certificate() != before)

        assert changing_server.process.wait_for("certificates_read")
        assert stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, [1])})).HasField("drafts")
        stream.end()


def test_a_half_written_certificate_is_passed_over_with_a_warning(changing_server: TcpServer) -> None:
    before = changing_server.certificate()
    (changing_server.folder / "cert.pem").write_text("-----BEGIN CERTIFICATE-----\nhalf")

    assert before == changing_server.certificate()
    assert "tls_cert" in changing_server.process.wait_for("certificates_not_read")["error"]


def test_rights_that_change_hold_for_the_next_call(changing_server: TcpServer) -> None:
    path = changing_server.folder / "identities.toml"
    with changing_server.channel(changing_server.credentials("engine-b")) as channel:
        assert DENIED == code_of(lambda: histories(channel).GetStats(history_pb2.GetStatsRequest()))
        path.write_text(IDENTITIES.replace('["team-b"]', '["team-b"], history = true'))
        os.utime(path, ns=(1, 1))  # another time even on a coarse clock
        assert 1 == len(histories(channel).GetStats(history_pb2.GetStatsRequest()).models)
        path.write_text("half = {")

        assert 1 == len(histories(channel).GetStats(history_pb2.GetStatsRequest()).models)


def test_commands_reach_the_server_over_tcp(server: TcpServer) -> None:
    issued = server.authority.issue_cert("engine-a")
    issued.private_key_pem.write_to_path(str(server.folder / "client.key"))
    issued.cert_chain_pems[0].write_to_path(str(server.folder / "client.pem"))
    files = {"--ca": "ca.pem", "--cert": "client.pem", "--key": "client.key"}
    flags = [word for flag, file in files.items() for word in (flag, str(server.folder / file))]

    result = CliRunner().invoke(main, ["stats", "--tcp", f"localhost:{server.port}", *flags])

    assert 0 == result.exit_code
    assert f"model {FINGERPRINT}: 0 open requests" in result.stdout


@pytest.mark.parametrize(
    ("file", "content", "option"),
    [
        ("key.pem", None, "tls_key"),
        ("cert.pem", "no certificate", "tls_cert"),
        ("ca.pem", "", "tls_client_ca"),
        ("identities.toml", "engine-a = 1", "tls_identities"),
        ("identities.toml", "engine-a = {namespaces = []}", "tls_identities"),
    ],
)
def test_a_file_that_does_not_fit_ends_the_program_with_its_option(
    tmp_path: Path, file: str, content: str | None, option: str
) -> None:
    authority = trustme.CA()
    write_files(authority, tmp_path)
    foreign_key = authority.issue_cert("localhost").private_key_pem.bytes()
    (tmp_path / file).write_bytes(foreign_key if content is None else content.encode())

    result = CliRunner().invoke(main, ["serve", "--check-config", "--tcp", "localhost:0", *tls_flags(tmp_path)])

    assert 2 == result.exit_code
    assert f"agentspec option '{option}'" in result.stderr
