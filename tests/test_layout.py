"""The rules of the layout: who may import whom, what may include what, and that map and versions are true."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parent.parent
CORE = PROJECT / "sidecar/core"
MAX_LINES = 600


@dataclass(frozen=True, slots=True)
class ImportRule:
    """What the package of one root may import besides itself and the standard library.

    Attributes:
        package: import name of the package.
        ours: modules of ours, each with all that is below it.
        third_party: top-level names.
        restricted: further top-level names, each with the only files that may import it.
    """

    package: str
    ours: tuple[str, ...] = ()
    third_party: tuple[str, ...] = ()
    restricted: tuple[tuple[str, tuple[str, ...]], ...] = ()


VLLM_FILES = ("hook_v1.py", "hook_v2.py", "scheduler_v2.py", "compat.py", "compat_v2.py", "model_reader.py")
# One row for each root; `benchmarks` may import everything.
# What the hook takes of the sidecar's package: the engine and its words, no server.
SIDECAR_PARTS = (
    *("block_feed", "block_sharing", "budget", "engine", "epochs", "grammar_store", "grammars", "options", "sealed"),
    *("shared_blocks", "shared_messages", "store", "tags", "telemetry", "worker"),
)
IMPORT_RULES = {
    "proto": ImportRule("agentspec.draft", third_party=("google", "grpc")),
    "middleware": ImportRule(
        "agentspec.middleware",
        third_party=(
            *("langchain", "langchain_core", "langchain_openai", "langgraph", "openai"),
            *("opentelemetry", "rich"),
        ),
    ),
    "sidecar": ImportRule(
        "agentspec.sidecar",
        ours=("agentspec.draft",),
        third_party=(
            *(
                "click",
                "cryptography",
                "google",
                "grpc",
                "grpc_health",
                "grpc_reflection",
                "numpy",
                "opentelemetry",
                "prometheus_client",
                "pydantic",
                "pydantic_core",
                "redis",
                "structlog",
                "tokenizers",
            ),
        ),
    ),
    "serving_patch": ImportRule(
        "agentspec.serving_patch",
        ours=(
            "agentspec.draft",
            *(f"agentspec.sidecar.{name}" for name in SIDECAR_PARTS),
        ),
        third_party=("click", "google", "grpc", "numpy", "opentelemetry"),
        restricted=tuple((name, VLLM_FILES) for name in ("torch", "vllm", "xgrammar")),
    ),
}
ROOTS = (*IMPORT_RULES, "benchmarks")

# Each file of the core includes files to its left only.
CORE_ORDER = (
    *("types", "archive", "marker_automaton", "grammar", "block_tracker"),
    *(
        "block_pool",
        "line_store",
        "slot_table",
        "bucket_pool",
        "context_hash",
        "context_index",
        "history",
        "history_account",
        "history_table",
    ),
    *("block_feed", "calibration", "drafter", "cost_model", "budget", "budget_planner", "request"),
    *("engine", "engine_budget", "engine_feed", "engine_histories", "bindings"),
    *("core_test", "index_test"),
)


def python_files(root: str) -> list[Path]:
    return [path for path in sorted((PROJECT / root).rglob("*.py")) if "_pb2" not in path.name]


def core_files() -> list[Path]:
    return sorted(path for path in CORE.iterdir() if path.suffix in {".cc", ".h"})


def pyproject() -> dict[str, Any]:
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())


def imports_of(tree: ast.AST, module: str, packages: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every module that a file imports, at whatever depth.

    Args:
        tree: the parsed file.
        module: its own import name; an `__init__.py` has the name `<package>.__init__`.
        packages: names from which `from package import name` is taken to import the module `package.name`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if base in packages else base


def is_below(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def breach(rule: ImportRule, file_name: str, imported: str) -> str | None:
    """Say which rule an import breaks, or None."""
    top = imported.partition(".")[0]
    if top == "agentspec":
        if is_below(imported, (rule.package, *rule.ours)):
            return None
        return f"{rule.package} may import of ours only {list(rule.ours) or 'itself'}"
    if top in sys.stdlib_module_names or top in rule.third_party:
        return None
    if (files := dict(rule.restricted).get(top)) is not None:
        return None if file_name in files else f"only {', '.join(files)} may import {top}"
    return f"{rule.package} may import of third parties only {', '.join(rule.third_party)}"


def breaches(root: str, path: Path, source: str) -> list[str]:
    rule = IMPORT_RULES[root]
    packages = {"agentspec", "agentspec.draft.v1", *(f"agentspec.{name}" for name in ROOTS)}
    module = ".".join(path.relative_to(PROJECT / root).with_suffix("").parts)
    return [
        f"{path.relative_to(PROJECT)}:{line}: imports {imported}: {broken}"
        for line, imported in imports_of(ast.parse(source), module, packages)
        if (broken := breach(rule, path.name, imported))
    ]


@pytest.mark.parametrize("root", IMPORT_RULES)
def test_imports_follow_the_table(root: str) -> None:
    found = [line for path in python_files(root) for line in breaches(root, path, path.read_text())]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("middleware/agentspec/middleware/tags.py", "import agentspec.sidecar.tags", "only itself"),
        ("middleware/agentspec/middleware/tags.py", "from agentspec import sidecar", "only itself"),
        ("middleware/agentspec/middleware/tags.py", "from ..sidecar import tags", "only itself"),
        ("middleware/agentspec/middleware/tags.py", "def f():\n    import numpy", "of third parties"),
        ("sidecar/agentspec/sidecar/store.py", "from agentspec.serving_patch import client", "agentspec.draft"),
        ("serving_patch/agentspec/serving_patch/client.py", "import vllm.config", "only hook_v1.py"),
        ("serving_patch/agentspec/serving_patch/client.py", "from agentspec.sidecar import _core", "of ours only"),
    ],
)
def test_a_forbidden_import_is_found_and_named(file: str, source: str, message: str) -> None:
    found = breaches(file.partition("/")[0], PROJECT / file, source)

    assert [True] == [line.startswith(f"{file}:{len(source.splitlines())}: ") and message in line for line in found]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("middleware/agentspec/middleware/scope.py", "from . import tags\nfrom .tags import Tags\nimport contextvars"),
        ("serving_patch/agentspec/serving_patch/client.py", "from agentspec.sidecar import engine"),
        ("serving_patch/agentspec/serving_patch/hook_v1.py", "from vllm.v1.core.sched.scheduler import Scheduler"),
    ],
)
def test_an_allowed_import_is_let_through(file: str, source: str) -> None:
    assert [] == breaches(file.partition("/")[0], PROJECT / file, source)


def test_no_folder_closes_the_namespace() -> None:
    """An `agentspec/__init__.py` in one root hides the other roots."""
    assert [] == [root for root in (*ROOTS, "examples", "tests") if (PROJECT / root / "agentspec/__init__.py").exists()]


def test_core_files_include_downward_only() -> None:
    found = []
    for path in core_files():
        assert path.stem in CORE_ORDER, f"{path.name}: give it a place in CORE_ORDER"
        allowed = CORE_ORDER[: CORE_ORDER.index(path.stem) + 1]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = re.match(r'\s*#\s*include\s+"(?:.*/)?([^/"]+)\.h"', line)
            if include and include[1] not in allowed:
                found.append(f"sidecar/core/{path.name}:{number}: includes {include[1]}.h, which is not below it")

    assert not found, "\n".join(found)


def test_only_the_bindings_know_python() -> None:
    knows_python = re.compile(r"#\s*include\s+[<\"](nanobind/|Python\.h)")

    assert set() == {path.name for path in core_files() if knows_python.search(path.read_text())} - {"bindings.cc"}


def test_no_file_is_longer_than_the_limit() -> None:
    files = [path for root in (*ROOTS, "examples", "tests") for path in python_files(root)] + core_files()
    lengths = {str(path.relative_to(PROJECT)): len(path.read_text().splitlines()) for path in files}

    assert {} == {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## \[(\d\S*)\]", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert newest is not None
    assert newest[1] == pyproject()["project"]["version"]


def test_types_are_checked_in_every_root() -> None:
    """mypy's `packages` setting would check the first root only, and say so to nobody."""
    mypy = pyproject()["tool"]["mypy"]
    folders = [*(f"{root}/agentspec" for root in ROOTS), "examples", "tests"]

    assert {folder for folder in folders if any((PROJECT / folder).rglob("*.py"))} == set(mypy["files"])
    assert "packages" not in mypy


def test_every_source_file_is_on_the_map() -> None:
    readme = PROJECT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md yet")
    section = re.search(r"(?ims)^#+ [^\n]*\bmap\b.*?(?=^## |\Z)", readme.read_text())
    assert section is not None, "README.md has no heading with the word Map"
    missing = [path for path in mapped_files() if not is_named(path, section[0])]

    assert not missing, "\n".join(["not on the map of README.md:", *missing])


def mapped_files() -> list[str]:
    files = [path for root in (*ROOTS, "examples") for path in python_files(root) if path.name != "__init__.py"]
    return [str(path.relative_to(PROJECT)) for path in (*files, *core_files())]


def is_named(path: str, text: str) -> bool:
    """Whether a text names a file by its name, or a C++ pair as `stem.{h,cc}`."""
    stem, _, suffix = path.rsplit("/", 1)[-1].rpartition(".")
    names = (f"{stem}.{suffix}", *([f"{stem}.{{h,cc}}"] if suffix in {"h", "cc"} else []))
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in names)
