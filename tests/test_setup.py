"""What `.ci/setup` decides before it installs anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent / ".ci"


def is_cpu_build(report: Path, version: str, requires: list[str]) -> bool:
    torch = {"metadata": {"name": "torch", "version": version, "requires_dist": requires}}
    report.write_text(json.dumps({"version": "1", "install": [torch]}))
    return subprocess.run([sys.executable, CI / "torch_build.py", report], check=False).returncode == 0


@pytest.mark.parametrize(
    ("version", "requires"),
    [
        ("2.13.0+cpu", ["filelock", 'nvidia-cublas==13.1.0.3; sys_platform == "linux"']),
        ("2.13.0", ["filelock", 'nvidia-cublas==13.1.0.3; sys_platform == "no such platform"']),
        ("2.13.0", ["filelock", 'nvidia-cublas==13.1.0.3; extra == "cuda"']),
    ],
)
def test_a_torch_without_cuda_libraries_is_a_cpu_build(tmp_path: Path, version: str, requires: list[str]) -> None:
    assert is_cpu_build(tmp_path / "report.json", version, requires)


@pytest.mark.parametrize(
    ("version", "requires"),
    [
        ("2.13.0", ["filelock", f'nvidia-cublas==13.1.0.3; sys_platform == "{sys.platform}"']),
        ("2.13.0", ["cuda-bindings>=13.0"]),
        ("2.13.0+cu130", ["filelock"]),
    ],
)
def test_a_torch_that_brings_cuda_is_not_a_cpu_build(tmp_path: Path, version: str, requires: list[str]) -> None:
    assert not is_cpu_build(tmp_path / "report.json", version, requires)


def run_setup(project: Path, *, python: str) -> subprocess.CompletedProcess[str]:
    shutil.copytree(CI, project / ".ci")
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": python}
    return subprocess.run(
        [project / ".ci/setup"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_python_that_is_too_old_is_refused_with_what_to_do(tmp_path: Path) -> None:
    old_python = tmp_path / "python3.9"
    old_python.write_text(
        '#!/bin/sh\ncase "$*" in -V) echo "Python 3.9.18" ;; *"version_info < (3, 11)"*) exit 1 ;; esac\n'
    )
    old_python.chmod(0o755)

    refused = run_setup(tmp_path / "project", python=str(old_python))

    assert refused.returncode == 1
    assert "is Python 3.9.18, expected Python >= 3.11: set PYTHON=<path>" in refused.stderr
    assert not (tmp_path / "project/.venv").exists()


def test_a_python_that_does_not_run_is_named(tmp_path: Path) -> None:
    refused = run_setup(tmp_path / "project", python="/nowhere/python3")

    assert refused.returncode == 1
    assert "/nowhere/python3 does not run" in refused.stderr
