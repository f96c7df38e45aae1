"""A GGUF file as a folder with the files of a checkpoint: `config.json` and the tokenizer, written once from the file.

Everything that reads a checkpoint can read this folder. It lies in the user's cache, is named after path, size and time
of the file, and has a link to the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manylora.engine.model.gguf_config import gguf_config
from manylora.errors import ConfigError
from manylora.user_cache import cache_folder, is_private

GGUF_FILE = "model.gguf"
LAYOUT = 1
"""Version of the written files; to be raised when they change."""


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors.

    Raises:
        ConfigError: The folder has several.
    """
    found = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(
            f"model.path: {folder} has several GGUF files: name one of {names}", param="model.path"
        )
    return found[0] if found else None


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF file; make it if it is missing.

    Raises:
        ConfigError: The file cannot be read, its model is not served, or there is no cache folder that only this user
            can write to.
    """
    path, state = path.absolute(), path.stat()
    key = json.dumps([LAYOUT, str(path), state.st_size, state.st_mtime_ns])
    with _cache_errors_told(path):
        cache = cache_folder("gguf")
        target = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
        if target.exists() and not is_private(target):
            raise PermissionError(f"{target} is another user's or can be written by others")
    if not target.is_dir():
        config = gguf_config(path)
        with _cache_errors_told(path), tempfile.TemporaryDirectory(dir=cache) as temporary:
            made = Path(temporary) / "made"
            made.mkdir(mode=0o700)
            (made / GGUF_FILE).symlink_to(path)
            (made / "config.json").write_text(json.dumps(config, indent=2))
            _write_tokenizer(made)
            _move(made, target)
    return target


@contextmanager
def _cache_errors_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        message = f"model.path: no folder for config and tokenizer of {path}: {error}; set XDG_CACHE_HOME to another"
        raise ConfigError(message, param="model.path") from error


def _move(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # if it is there, another process was faster
            raise


def _write_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(str(folder), gguf_file=GGUF_FILE).save_pretrained(str(folder))
    except (
        Exception
    ) as error:  # transformers may raise anything for a tokenizer that it cannot read
        path = os.path.realpath(folder / GGUF_FILE)
        message = f"model.path: transformers cannot read the tokenizer of {path}: {error}"
        raise ConfigError(message, param="model.path") from error
