"""A checkpoint's folder: one manifest names the data that counts, and replacing the manifest is the only step that matters.

    PATH/conduit.json                      the manifest: a digest, and the body as plain JSON
    PATH/conduit-0123456789abcdef/         the arrays the manifest speaks of

A save writes a data folder of its own, then the manifest beside the old one, then renames it over the old one. Whoever is
killed before the rename leaves the former checkpoint as it was, and a data folder that no manifest names: it is never
read, and the next save removes it. Files that are not ours are left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from conduit_jax.errors import CheckpointError, explain, refuse

FORMAT = 4  # 3 knew functions by name, 2 kept one group of rows, 1 five parts of a sample
MANIFEST = "conduit.json"
_DATA = re.compile(r"conduit-[0-9a-f]{16}")
_DRAFT = re.compile(r"conduit\.json\.[0-9a-f]{16}")

Body = dict[str, Any]


class Draft(NamedTuple):
    """A checkpoint being written: arrays go to ``data``, everything else into ``body``."""

    data: Path
    body: Body


class Saved(NamedTuple):
    """A checkpoint that was written whole."""

    data: Path
    body: Body


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Draft]:
    """Write a checkpoint to ``path`` in the block; it takes the former one's place when the block ends without an error.

    Raises ``CheckpointError`` where ``path`` is not a folder, or another process is saving to it.
    """
    home = Path(path)
    if home.exists() and not home.is_dir():
        refuse(CheckpointError, "A checkpoint is a folder.", got=f"a file: {home}", want="a folder, or a new path")
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home):
        token = secrets.token_hex(8)
        draft = Draft(home / f"conduit-{token}", {})
        draft.data.mkdir()
        try:
            yield draft
            _sync(draft.data)
            _commit(home, draft, token)
        except BaseException:
            shutil.rmtree(draft.data, ignore_errors=True)
            raise
        _remove_others(home, keep=draft.data.name)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint was ever written whole to ``path``."""
    return (Path(path) / MANIFEST).is_file()


def opened(path: str | os.PathLike[str]) -> Saved:
    """Return the checkpoint in ``path``; ``CheckpointError`` where there is none, or its manifest is damaged."""
    home = Path(path)
    if not exists(home):
        got = "no such folder" if not home.exists() else f"{home} without {MANIFEST}"
        fix = "a save that was cut short leaves nothing to restore; restore from another folder"
        refuse(CheckpointError, "There is no checkpoint here.", got=got, want=f"{home / MANIFEST}", fix=fix)
    try:
        manifest = json.loads((home / MANIFEST).read_text())
        found, data, body, form = (manifest[name] for name in ("digest", "data", "body", "format"))
    except (ValueError, KeyError, TypeError) as error:
        damaged(home / MANIFEST, f"{type(error).__name__}: {error}", error)
    if form != FORMAT:
        refuse(CheckpointError, "The checkpoint has another format.", got=form, want=FORMAT, fix="use the same release")
    if found != _digest(body) or not (isinstance(data, str) and _DATA.fullmatch(data)):
        damaged(home / MANIFEST, "its contents do not match its digest")
    return Saved(home / data, body)


def damaged(what: Path | str, why: str, cause: BaseException | None = None) -> NoReturn:
    """Raise the ``CheckpointError`` of a file that is not what was written."""
    message = explain(
        "The checkpoint is damaged; nothing of it was used.",
        got=f"{what}: {why}",
        want="the bytes that were saved",
        fix="restore another checkpoint, or copy this one again",
    )
    raise CheckpointError(message) from cause


def _commit(home: Path, draft: Draft, token: str) -> None:
    manifest = {"format": FORMAT, "data": draft.data.name, "digest": _digest(draft.body), "body": draft.body}
    beside = home / f"{MANIFEST}.{token}"
    try:
        with beside.open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(home / MANIFEST)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync(home)


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _remove_others(home: Path, keep: str) -> None:
    for entry in home.iterdir():
        if _DATA.fullmatch(entry.name) and entry.name != keep:
            shutil.rmtree(entry, ignore_errors=True)
        elif _DRAFT.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make the folder's entries last: a rename is only on the disk once its folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Hold the folder against other processes that save; the kernel lets go of it when a process dies."""
    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        refuse(CheckpointError, "Somebody else is saving to this folder.", got=home, fix="give each run its own folder")
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)
