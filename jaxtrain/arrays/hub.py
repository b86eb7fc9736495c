"""An export to the Hugging Face Hub, file by file. A file that is there already, to the byte, is not sent again.

The weights go first and the card last, so that a model that can be found is whole. An interrupted upload is resumed by the same
command. The Hub's own client keeps track of files that were sent in part.
"""

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.source import SUMS
from jaxtrain.arrays.stored import StoredError
from loaders.io.checks import first_line

CARD = "README.md"
CHUNK = 1 << 24  # [bytes] that are read at once


def push(
    folder: str, name: str, *, private: bool = False, api: Any = None, tell: Callable[[str], None] = lambda line: None
) -> str:
    """Upload a folder of `jaxtrain export` as the model ``name``. Return a line about it.

    Args:
      name: OWNER/MODEL, or MODEL of the account that is logged in.
      private: whether a model that is new is seen by its owner alone.
      api: a `huggingface_hub.HfApi`; None = that of the account which `hf auth login` stored.

    Raises StoredError: no export, a damaged one, or a refusal by the Hub.
    """
    source = source_lib.find(folder)
    place = pathlib.Path(source.path)
    if not source.is_export or not (place / SUMS).is_file():
        raise StoredError(f"{folder} is no export with its {SUMS}; make one with --out, then push it")
    if damaged := source.damage():
        raise StoredError(f"{folder} is damaged: {'; '.join(damaged)}; export it again")
    if api is None:
        import huggingface_hub

        api = huggingface_hub.HfApi(library_name="jaxtrain")
    # The exported files alone, whatever else lies there.
    names = [line.partition("  ")[2] for line in (place / SUMS).read_text().splitlines()]
    files = sorted((place / each for each in (*names, SUMS)), key=_order)
    sent = 0
    try:
        made = api.create_repo(name, private=private, repo_type="model", exist_ok=True)
        whole = getattr(made, "repo_id", None) or name
        there = {entry.path: entry for entry in api.list_repo_tree(whole, recursive=True) if hasattr(entry, "blob_id")}
        for path in files:
            if path.name in there and _is_same(path, there[path.name]):
                tell(f"{path.name} is there already")
                continue
            tell(f"{path.name}: {path.stat().st_size:,} bytes")
            api.upload_file(
                path_or_fileobj=str(path), path_in_repo=path.name, repo_id=whole, commit_message=f"Add {path.name} by jaxtrain"
            )
            sent += 1
    except Exception as error:  # noqa: BLE001  of whatever kind the Hub's client raises
        why = first_line(error)
        raise StoredError(f"{name} could not be uploaded: {why}; rerun the same command to resume") from error
    return f"{whole}: {sent} of {len(files)} files sent, {len(files) - sent} were there already"


def _order(path: pathlib.Path) -> tuple[bool, bool, str]:
    return path.name == CARD, not path.name.endswith(".safetensors"), path.name


def _is_same(path: pathlib.Path, entry: Any) -> bool:
    """Whether the Hub has these bytes: by SHA-256 of a large file, by git's own digest of a small one."""
    size = path.stat().st_size
    if getattr(entry, "size", None) != size:
        return False
    large = getattr(entry, "lfs", None)
    digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            digest.update(part)
    return digest.hexdigest() == (large.sha256 if large else entry.blob_id)
