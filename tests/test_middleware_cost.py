"""What the middleware costs, beside work of the client that a busy machine slows down alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.middleware_bench import SHAPES, MiddlewareBench, request_body

# Twice what was measured on a busy machine (0.6 and 3.1), of the time that encoding the body as JSON takes.
MAX_INJECT_RATIO = 1.2
MAX_ADDED_RATIO = 6.2


@pytest.fixture(scope="module")
def cost() -> dict[str, Any]:
    """Of a call with 20 tools and 40 messages."""
    (cell,) = MiddlewareBench(num_rounds=15).run([(20, 40)])
    return cell


def test_injection_costs_no_more_than_encoding_the_body(cost: dict[str, Any]) -> None:
    assert 0 < cost["inject_ratio"] < MAX_INJECT_RATIO


def test_all_that_is_added_to_a_call_is_a_few_encodings_of_its_body(cost: dict[str, Any]) -> None:
    assert cost["added_ratio"] < MAX_ADDED_RATIO


def test_the_tags_of_twenty_tools_are_less_than_a_kibibyte(cost: dict[str, Any]) -> None:
    assert 0 < cost["tag_bytes"] <= 1024


def test_bodies_have_the_shape_that_is_named() -> None:
    body = request_body(3, 5)

    assert (len(body["tools"]), len(body["messages"])) == (3, 5)
    assert "tools" not in request_body(0, 2)


def test_the_command_shows_and_writes_a_row_for_each_shape(tmp_path: Path) -> None:
    path = tmp_path / "middleware.json"
    done = CliRunner().invoke(main, ["middleware", "--rounds", "2", "--json", str(path)])

    assert 0 == done.exit_code, done.output
    assert "middleware, CPU time of a call on this machine" in done.output
    result = json.loads(path.read_text())
    assert ["middleware", 2] == [result["meta"][name] for name in ("command", "num_rounds")]
    assert list(SHAPES) == [(cell["num_tools"], cell["num_messages"]) for cell in result["cells"]]
