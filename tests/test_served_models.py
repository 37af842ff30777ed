"""The models of a server as one: what is asked of all of them holds for each."""

from __future__ import annotations

import asyncio

import pytest

from agentspec.sidecar.callers import Caller
from agentspec.sidecar.served_model import ServedModel
from agentspec.sidecar.served_models import ServedModels, Vocabulary
from agentspec.sidecar.server_options import ServerOptions

CALLER = Caller("unix", ("default",), is_local=True)


def register(models: ServedModels, name: str) -> ServedModel:
    vocabulary = Vocabulary(name * 64, "", [name.encode(), b"text"])
    return asyncio.run(models.register(vocabulary, CALLER))


@pytest.fixture
def models() -> ServedModels:
    return ServedModels(ServerOptions.model_validate({"max_models": 2, "policy": "uniform"}), {}, roots=list)


def test_policy_of_the_options_is_that_of_every_engine(models: ServedModels) -> None:
    assert ["uniform", "uniform"] == [register(models, name).engine.policy for name in "ab"]


def test_switch_reaches_models_that_are_there_and_those_that_come(models: ServedModels) -> None:
    first = register(models, "a")
    models.set_policy("shadow")
    second = register(models, "b")

    assert ["shadow"] * 3 == [models.policy, first.engine.policy, second.engine.policy]


def test_unknown_policy_changes_no_engine(models: ServedModels) -> None:
    model = register(models, "a")

    with pytest.raises(ValueError, match=r"policy: expected one of goodput, .* got 'fast'"):
        models.set_policy("fast")  # type: ignore[arg-type]  # that is the test
    assert ("uniform", "uniform") == (models.policy, model.engine.policy)
