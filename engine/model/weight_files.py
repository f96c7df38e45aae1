"""Files of a checkpoint's weights, and the search for a head besides the embedding. Only that search may need torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from manylora import strict_json
from manylora.engine.model.config_fields import shown
from manylora.engine.model.gguf import GGUF_FILE
from manylora.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Tensors of a checkpoint that do not belong to a layer.
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order of name, or its GGUF file.

    Raises:
        ConfigError: There is no file, or the index is broken or names files outside the folder.
    """
    index = folder / INDEX_FILE
    for name in (SINGLE_FILE, *(() if index.is_file() else (GGUF_FILE,))):
        if (folder / name).is_file():
            return [folder / name]
    if not index.is_file():
        raise ConfigError(
            f"model.path: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read. If this is "
            "the Hugging Face cache, the download may be incomplete: start once with access to the hub.",
            param="model.path",
        )
    names = sorted(set(_places(index).values()))
    files = [folder / name for name in names if Path(name).name == name]
    missing = sorted(set(names) - {file.name for file in files if file.is_file()})
    if missing or not files:
        raise ConfigError(
            f"model.path: {index} names files that are not there: {shown(missing)}",
            param="model.path",
        )
    return files


def holds_own_head(folder: Path) -> bool:
    """True if a checkpoint has a head that differs from the embedding. Without weights, the index must name both.

    A head without an embedding counts as the embedding too, as in transformers.

    Raises:
        ConfigError: A file cannot be read.
    """
    index = folder / INDEX_FILE
    if not (folder / SINGLE_FILE).is_file() and index.is_file():
        places = _places(index)
        if EMBEDDING not in places or not any(map(_is_of_head, places)):
            return False
        files = {folder / name for name in places.values() if Path(name).name == name}
    else:
        files = {folder / SINGLE_FILE}
    if not all(file.is_file() for file in files):
        return index.is_file()
    found = {name: file for file in files for name in _names(file)}
    if EMBEDDING in found and HEAD in found:
        return not _are_equal(found[EMBEDDING], found[HEAD])
    return EMBEDDING in found and any(map(_is_of_head, found))


def _is_of_head(name: str) -> bool:
    return name.startswith(HEAD.removesuffix("weight"))


def _places(index: Path) -> dict[str, str]:
    """File names by tensor, from an index."""
    try:
        return {
            str(tensor): str(name)
            for tensor, name in strict_json.loads(index.read_bytes())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.path: cannot read {index}: {error}", param="model.path"
        ) from error


def _names(file: Path) -> list[str]:
    """Names of the tensors of a file."""
    try:
        with safe_open(file, "np") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.path: cannot read {file}: {error}", param="model.path") from error


def _are_equal(embedding_file: Path, head_file: Path) -> bool:
    """True if embedding and head have the same bytes."""
    import torch  # late: few checkpoints of tied models have both

    with safe_open(embedding_file, "pt") as one, safe_open(head_file, "pt") as other:
        embedding = one.get_tensor(EMBEDDING)
        head = other.get_tensor(HEAD)
    return (embedding.dtype, embedding.shape) == (head.dtype, head.shape) and torch.equal(
        embedding.view(torch.uint8), head.view(torch.uint8)
    )
