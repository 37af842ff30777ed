"""The Unix socket as a file: its folder, its mode, and that one server at a time has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

from agentspec.sidecar.options import OptionsError

log = structlog.get_logger()

FOLDER_MODE = 0o2770  # the group's, which files in it inherit
SOCKET_UMASK = 0o117  # of a socket of mode 0660


class SocketInUseError(RuntimeError):
    """Another server has the socket; the message names both."""


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """Hold the right to a socket's path while a server runs; what a killed server left there is removed.

    A missing folder is made with mode 2770; one that exists is used as it is, with a warning if it has another mode.

    Raises:
        SocketInUseError: another server holds it.
        OptionsError: the folder can't be made or used, or something else than a socket lies at the path.
    """
    path = path.absolute()
    _prepare_folder(path.parent)
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
    except OSError as error:
        raise OptionsError(f"agentspec option 'socket': {path}.lock: {error.strerror}") from None
    try:
        _lock(lock, path)
        _remove_stale(path)
        yield path
    finally:
        os.close(lock)


@contextlib.contextmanager
def socket_umask() -> Iterator[None]:
    """Let files made meanwhile have no rights for others; for the whole process, so before it has threads."""
    before = os.umask(SOCKET_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def _prepare_folder(folder: Path) -> None:
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(FOLDER_MODE)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise OptionsError(f"agentspec option 'socket': {folder}: {error.strerror}") from None
    if mode != FOLDER_MODE:
        log.warning("socket_folder_mode_unexpected", folder=str(folder), mode=oct(mode), expected=oct(FOLDER_MODE))


def _lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise SocketInUseError(
            f"{path} belongs to another server (pid {holder}); stop it or choose another socket"
        ) from None
    with contextlib.suppress(PermissionError):  # another user's, left by an earlier server
        os.fchmod(lock, 0o660)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OptionsError(f"agentspec option 'socket': {path} exists and is no socket")
    path.unlink()
    log.info("stale_socket_removed", socket=str(path))
