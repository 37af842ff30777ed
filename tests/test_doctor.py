"""`agentspec-vllm doctor`: what it finds, what it says, and its exit code."""

from __future__ import annotations

import importlib.metadata
import signal
import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from tests.sidecar_lab import running_sidecar

from agentspec.serving_patch import __main__ as command_line
from agentspec.serving_patch import doctor
from agentspec.serving_patch.__main__ import main
from agentspec.serving_patch.compat import CompatibilityError
from agentspec.serving_patch.doctor import (
    Finding,
    check_model,
    check_namespace,
    check_plugin,
    check_port,
    check_sidecar,
    examine,
)
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.options import Options


def test_namespace_of_ours_is_not_hidden() -> None:
    assert check_namespace().status == "ok"


def test_package_of_another_project_that_hides_ours_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agentspec").mkdir()
    (tmp_path / "agentspec" / "__init__.py").write_text("")
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "agentspec")
        patched.syspath_prepend(tmp_path)
        patched.setattr(sys, "meta_path", [PathFinder])  # an editable install brings a finder that comes first
        finding = check_namespace()

    assert finding.status == "fail"
    assert str(tmp_path) in finding.detail
    assert "uninstall" in finding.fix


def test_taken_port_is_found() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = check_port(port)

    assert finding.status == "warn"
    assert str(port) in finding.detail
    assert check_port(port).status == "ok"
    assert check_port(0).status == "warn"


@pytest.mark.parametrize(
    ("installed", "environ", "status"),
    [
        (["agentspec"], {}, "ok"),
        (["agentspec"], {"VLLM_PLUGINS": "other,agentspec"}, "ok"),
        (["agentspec"], {"VLLM_PLUGINS": "other"}, "warn"),
        (["agentspec"], {"VLLM_PLUGINS": ""}, "warn"),
        ([], {}, "warn"),
    ],
)
def test_plug_in_that_vllm_will_not_load_is_found(
    installed: list[str], environ: dict[str, str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [SimpleNamespace(name=name) for name in installed]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)

    assert check_plugin(environ).status == status


def test_missing_vllm_is_one_failure_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise CompatibilityError("vLLM is not installed; install it")

    monkeypatch.setattr(doctor, "check_version", refuse)
    findings = list(examine(Options(metrics_port=0), "some/model", {}))

    assert findings[-1] == Finding("vllm", "fail", "vLLM is not installed; install it")


def test_grammar_of_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_model", lambda _: ([b"a", b"b"], CHAT))

    assert check_model("m") == Finding("model", "ok", "m: 2 tokens, grammar chat")


def test_tokenizer_that_is_not_understood_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_model", lambda _: ([b"", b""], CHAT))

    assert check_model("m").status == "warn"


@pytest.mark.parametrize(("status", "exit_code"), [("ok", 0), ("warn", 0), ("fail", 2)])
def test_exit_code_is_2_when_the_engine_would_not_start(
    status: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("vllm", "ok", "0.32.0"), Finding("thing", status, "is so", "do this")]  # type: ignore[arg-type]  # a parameter
    monkeypatch.setattr(command_line, "examine", lambda options, model: findings)
    result = CliRunner().invoke(main, ["doctor", "some/model", "--port", "1"])

    assert result.exit_code == exit_code
    assert result.output.splitlines()[1:] == [f"{status:5}thing: is so", "     -> do this"]


def test_flags_that_serve_would_refuse_are_refused() -> None:
    result = CliRunner().invoke(main, ["doctor", "some/model", "--async-scheduling"])

    assert result.exit_code == 2
    assert "--async-scheduling: " in result.output


@pytest.mark.vllm
@pytest.mark.filterwarnings("default")
def test_installed_vllm_and_a_real_model_are_fine(model_path: str) -> None:
    result = CliRunner().invoke(main, ["doctor", model_path])

    assert result.exit_code == 0
    assert "ok   vllm's scheduler: supported" in result.output
    assert "grammar chat" in result.output


@pytest.mark.vllm
@pytest.mark.filterwarnings("default")
def test_model_that_does_not_exist_is_a_failure(require_vllm: None) -> None:
    result = CliRunner().invoke(main, ["doctor", "/no/such/model"])

    assert result.exit_code == 2
    assert "fail model: /no/such/model" in result.output


def test_draft_server_that_answers_is_named_with_its_version(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock") as server:
        finding = check_sidecar(Options(mode="sidecar", socket=server.socket))

    assert finding.status == "ok"
    assert "version" in finding.detail
    assert "0 models" in finding.detail


def test_missing_draft_server_is_a_warning_that_says_how_to_start_it(tmp_path: Path) -> None:
    finding = check_sidecar(Options(mode="sidecar", socket=tmp_path / "draft.sock"))

    assert finding.status == "warn"
    assert "No such file" in finding.detail
    assert f"agentspec-sidecar serve --socket {tmp_path / 'draft.sock'}" in finding.fix


def test_draft_server_that_hangs_is_found_in_seconds(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock") as server:
        server.process.send_signal(signal.SIGSTOP)
        finding = check_sidecar(Options(mode="sidecar", socket=server.socket))

    assert finding.status == "warn"
    assert "DEADLINE_EXCEEDED" in finding.detail


def test_draft_server_is_looked_for_in_sidecar_mode_alone() -> None:
    subjects = {
        mode: [next(findings).subject for _ in range(3)]
        for mode, findings in (
            (mode, examine(Options.model_validate({"mode": mode}))) for mode in ("embedded", "sidecar")
        )
    }

    assert "draft server" in subjects["sidecar"]
    assert "draft server" not in subjects["embedded"]
