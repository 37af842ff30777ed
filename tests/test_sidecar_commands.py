"""The commands of `agentspec-sidecar` against a running server, as a person or a job types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.sidecar_lab import FINGERPRINT, SidecarProcess, running_sidecar, vocabulary_parts

from agentspec.sidecar.__main__ import main

LOG = [
    {"workflow": "review", "stage": "writer", "messages": [{"role": "user", "content": "Q"}], "output": "the plan is"},
    {"workflow": "review", "stage": "critic", "messages": [{"role": "assistant", "content": "no"}]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("sidecar") / "draft.sock", "--max-models", "2") as server:
        server.registered()
        yield server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as tokens, as the server's vocabulary has them, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({**{c: i for i, c in enumerate(alphabet[:255])}, "<end>": 255}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def run(server: SidecarProcess, *words: str, **more: Any) -> Result:
    name, *rest = words
    return CliRunner().invoke(main, [name, "--socket", str(server.socket), *rest], **more)


def keys(server: SidecarProcess) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(run(server, "keys", "--json").stdout)["keys"]
    return listed


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LOG) + "\nbroken\n")
    return path


def test_chat_logs_warm_the_histories_by_workflow_and_stage(server: SidecarProcess, tokenizer: Path, log: Path) -> None:
    result = run(server, "import", str(log), "--tokenizer", str(tokenizer), "--end-token", "<end>")

    assert (0, "15 tokens stored\n") == (result.exit_code, result.stdout)
    assert f"left out: {log}:3: broken line" in result.stderr
    assert [("critic", "3"), ("writer", "12")] == [(key["stage"], key["num_tokens"]) for key in keys(server)]


def test_an_archive_goes_out_and_in_again(server: SidecarProcess, tokenizer: Path, log: Path, tmp_path: Path) -> None:
    run(server, "import", str(log), "--tokenizer", str(tokenizer))
    before = keys(server)
    archive = tmp_path / "default.archive"
    assert 0 == run(server, "export", "default", "-o", str(archive)).exit_code
    deleted = run(server, "delete-namespace", "default", "--yes")
    assert (0, True) == (deleted.exit_code, deleted.stdout.endswith(" tokens forgotten\n"))
    assert [] == keys(server)

    assert 0 == run(server, "import", str(archive)).exit_code

    assert before == keys(server)


def test_archive_is_read_from_standard_input(server: SidecarProcess, tmp_path: Path) -> None:
    before = keys(server)
    archive = tmp_path / "default.archive"
    run(server, "export", "default", "-o", str(archive))
    run(server, "delete-namespace", "default", "--yes")

    assert 0 == run(server, "import", "-", input=archive.read_bytes()).exit_code

    assert before == keys(server) != []


def test_deleting_asks_first(server: SidecarProcess) -> None:
    result = run(server, "delete-namespace", "default", input="n\n")

    assert 1 == result.exit_code
    assert "Aborted" in result.output


def test_stats_are_a_table_or_json(server: SidecarProcess) -> None:
    table = run(server, "stats").stdout

    assert table.startswith(f"model {FINGERPRINT}: 0 open requests, ")
    assert table.splitlines()[1].split()[:4] == ["namespace", "workflow", "stage", "block"]
    assert FINGERPRINT == json.loads(run(server, "stats", "--json").stdout)["models"][0]["model_fingerprint"]


def test_health_is_an_exit_code(server: SidecarProcess) -> None:
    assert (0, "SERVING\n") == (run(server, "health").exit_code, run(server, "health").stdout)
    assert 1 == run(server, "health", "--service", "nobody").exit_code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "other", "-o", "-"], "PERMISSION_DENIED: namespace: unix may use default, got other"),
        (["import", "LOG"], "chat logs need the tokenizer.json"),
        (["import", "LOG", "--tokenizer", "LOG"], "chats.jsonl: "),
        (["import", "LOG", "--tokenizer", "TOKENIZER", "--end-token", "<no>"], "no token '<no>'"),
        (["keys", "--model", "x"], "INVALID_ARGUMENT: model_fingerprint: "),
        (["keys", "--tcp", "localhost:1"], "--tcp needs --ca, --cert and --key"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    server: SidecarProcess, words: list[str], message: str, log: Path, tokenizer: Path
) -> None:
    files = {"LOG": str(log), "TOKENIZER": str(tokenizer)}

    result = run(server, *(files.get(word, word) for word in words))

    assert 0 != result.exit_code
    assert message in result.stderr.splitlines()[-1]


def test_a_server_that_is_not_there_is_named_by_its_socket(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["stats", "--socket", str(tmp_path / "nobody.sock")])

    assert 1 == result.exit_code
    assert "UNAVAILABLE" in result.stderr
    assert "nobody.sock" in result.stderr


def test_several_models_must_be_chosen_from(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--max-models", "2") as server:
        assert "knows no model yet" in run(server, "keys").stderr
        server.registered()
        server.stub().RegisterTokenizer(vocabulary_parts([b"x"], "b" * 64))

        assert f"choose one with --model: {FINGERPRINT}, {'b' * 64}" in run(server, "keys").stderr
        assert 0 == run(server, "keys", "--model", "b" * 64).exit_code
