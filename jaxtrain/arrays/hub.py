"""An export to the Hugging Face Hub, in one commit: a model that can be found is whole.

The same command resumes an interrupted upload, since the Hub's client does not send what is there.
"""

import glob
import pathlib
from typing import Any

from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.source import SUMS
from jaxtrain.arrays.stored import StoredError
from loaders.io import files
from loaders.io.checks import first_line


def push(folder: str, name: str, *, private: bool = False, api: Any = None) -> str:
    """Upload a folder of `jaxtrain export` as the model ``name``. Return a line about it.

    ``name`` is OWNER/MODEL, or MODEL of the account that is logged in. ``api`` is a
    `huggingface_hub.HfApi`; None = that of the account which `hf auth login` stored. Raises
    StoredError: no export, a damaged one, or a refusal by the Hub.
    """
    source = source_lib.find(folder, verified=False)
    place = pathlib.Path(source.path)
    if not source.is_export or not (place / SUMS).is_file():
        raise StoredError(
            f"{folder} is no export with its {SUMS}; make one with --out, then push it"
        )
    damage = source.damage()
    if damage:
        raise StoredError(f"{folder} is damaged: {'; '.join(damage)}; export it again")
    if api is None:
        import huggingface_hub

        api = huggingface_hub.HfApi(library_name="jaxtrain")
    # The exported files alone. The client sends large ones first, and none that the Hub has.
    lines = files.lines(files.read_text(place / SUMS, most=files.MAX_JSON))
    names = [line.partition("  ")[2] for line in lines]
    try:
        repository = api.create_repo(name, private=private, repo_type="model", exist_ok=True)
        full_name = getattr(repository, "repo_id", None) or name
        api.upload_folder(
            repo_id=full_name,
            folder_path=str(place),
            allow_patterns=[*map(glob.escape, names), SUMS],
            commit_message="Add an export",
        )
    except Exception as error:  # noqa: BLE001  of whatever kind the Hub's client raises
        raise StoredError(
            f"{name} could not be uploaded: {first_line(error)}; rerun the same command to resume"
        ) from error
    return f"{full_name}: {len(names) + 1} files are there"
