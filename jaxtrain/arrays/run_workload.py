"""The code of a run's workload, for commands that read other people's runs.

A run's config names its workload's module. That config may come from anyone, and importing a module
runs it. So only a workload of this package, or the module that the user named with --workload, is
imported.
"""

import sys
from collections.abc import Mapping
from typing import Any

from jaxtrain import config as config_lib
from jaxtrain import workload
from jaxtrain.arrays import base_weights, warm_start
from jaxtrain.arrays.source import Source, refuse_address
from jaxtrain.arrays.stored import StoredError
from jaxtrain.types import Export, PyTree
from jaxtrain.workload import Workload
from loaders.io import files

MAX_LAYERS = 10_000


def of_run(config: Mapping[str, Any], named: str = "") -> Workload[Any] | None:
    """Return a run's workload, or None if it is not shipped and ``named`` (--workload) is not it.

    Raises StoredError: ``named`` is another module than the run's, or cannot be imported.
    """
    name = config.get("workload")
    if named and name != named:
        raise StoredError(
            f"--workload is {named}, and the run's workload is {name!r}; name that one, if you"
            " trust its code"
        )
    if name is None or name not in workload.shipped() and not named:
        return None
    try:
        return workload.of(name)
    except (ImportError, ValueError) as error:
        raise StoredError(f"workload {name!r} cannot be imported: {error}") from error


def unknown(config: Mapping[str, Any]) -> str:
    name = config.get("workload")
    return (
        f"the run's workload is {name!r}, which is imported only if you trust its code and name it"
        " with --workload"
    )


def export_of(config: Mapping[str, Any], named: str = "") -> Export:
    """Return how a run's workload is exported, by default without one. Raises StoredError."""
    workload_of_run = of_run(config, named)
    if workload_of_run is None or workload_of_run.export is None:
        return Export()
    return workload_of_run.export()


def specs_of(config: Mapping[str, Any], workload: Workload[Any]) -> PyTree:
    """Return the tree of Spec of a run's model. Raises StoredError: its workload makes none."""
    if workload.make_specs is None:
        raise StoredError(
            f"the run's workload {config.get('workload')!r} has no make_specs; add it to its"
            " WORKLOAD"
        )
    return workload.make_specs(section_of(config, "model", workload.config_class()))


def reason(error: Exception) -> str:
    """Return one line about an error that the config of a stranger's run caused."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def section_of(config: Mapping[str, Any], name: str, cls: type) -> Any:
    """Return a section of a run's config as ``cls``. Raises StoredError if it is none."""
    try:
        section = config_lib.section(cls, config.get(name) or {})
        problems = list(section.validate())
    except config_lib.ConfigError as error:
        raise StoredError(f"the run's config.{name} cannot be used: {error}") from error
    if problems:
        raise StoredError(f"the run's config.{name}.{problems[0][0]} {problems[0][1]}")
    return section


def with_base(source: Source, config: Mapping[str, Any], named: str = "") -> dict[str, Any]:
    """Return a run's config, whose warm_start.source is the verified place of its frozen weights.

    ``named``: a place that the user names, instead of the recorded ones. Raises StoredError: they
    are gone, or others; the run names an address, and the user does not.
    """
    section = dict(config.get("warm_start") or {})
    record = base_weights.recorded(source.data())
    if not named:
        refuse_address(section.get("source"), "warm_start.source", "--base")
        if record:
            refuse_address(record.source, "warm_start.source", "--base")
    if record and not record.source:
        section["source"] = named
    elif record:
        rules = section_of(config, "warm_start", config_lib.WarmStart)
        workdirs = base_weights.workdirs(source.path, config.get("workdir"))
        places = [named] if named else base_weights.places(record, workdirs)
        section["source"] = base_weights.find(record, rules, places)
    elif named or section.get("source"):
        section["source"] = named or section["source"]
        _refuse_damage(section)
        print(
            f"{source.path} does not record the digest of what it froze:"
            f" {section['source']} is taken for it"
        )
    return {**config, "warm_start": section}


def _refuse_damage(warm_start_section: Mapping[str, Any]) -> None:
    """Raise StoredError if the source of a run's frozen weights differs from its checksums."""
    rules = section_of({"warm_start": warm_start_section}, "warm_start", config_lib.WarmStart)
    problems = warm_start.damage(rules)
    if problems:
        raise StoredError(f"{rules.source} is damaged: {'; '.join(problems)}")


def model_section(config: Mapping[str, Any], cls: type, **changes: Any) -> Any:
    """Return the section ``model`` as ``cls``, some fields replaced. Raises StoredError."""
    return section_of({"model": {**model_of(config), **changes}}, "model", cls)


def refuse_other_file(source: Source, field: str, path: Any, flag: str) -> None:
    """Raise StoredError if a file that a run's config names is no longer the one it trained with.

    Args:
      field: of the config, "model.tokenizer".
      path: the value of the field, or anything else in a damaged config.
      flag: the option of the command that names another file.
    """
    digests = source.meta().get("files")
    recorded = digests.get(field) if isinstance(digests, dict) else None
    if not recorded or not isinstance(path, str) or not files.expanded(path).is_file():
        return
    digest = config_lib.digest_of(files.expanded(path))
    if digest != recorded:
        raise StoredError(
            f"{path}, config.{field} of {source.path}, is not the file that the run was trained"
            f" with: its sha256 begins with {digest}, and {recorded} is recorded; put that one"
            f" back, or name it with {flag}"
        )


def warn_of_other_file(
    source: Source, field: str, own: Any, given: str, flag: str, *, difference: str = ""
) -> None:
    """Print a warning if a file that the user names is not the one that the run was trained with.

    Args:
      field: of the config, "model.tokenizer".
      own: the run's, a path or anything else in a damaged config.
      given: the path, "bytes" or module:function that the user names with ``flag``.
      difference: how their contents differ, if that is known.
    """
    digests = source.meta().get("files")
    recorded = digests.get(field) if isinstance(digests, dict) else None
    known = {recorded, _digest_of_file(own)} - {None}
    digest = _digest_of_file(given)
    if given == own and (digest is None or not known) or digest is not None and digest in known:
        return
    if not known and not own:
        return  # nothing is known of the run's own
    reason = f": {difference}" if difference else ""
    print(
        f"warning: {flag} {given} is not {own}, which {source.path} was trained with"
        f" (config.{field}){reason}",
        file=sys.stderr,
    )


def _digest_of_file(path: Any) -> str | None:
    """Return the digest of a file, or None if there is none."""
    if not isinstance(path, str) or not path or not files.expanded(path).is_file():
        return None
    return config_lib.digest_of(files.expanded(path))


def exported_file(source: Source, name: str) -> str:
    """Return the path of a file that an export holds, or "". It comes before the run's own."""
    path = source.path / name
    return str(path) if source.is_export and path.exists() else ""


def model_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section ``model`` of a run's config. Raises StoredError if it is no model's."""
    model = config.get("model") or {}
    depth = model.get("depth", 1) if isinstance(model, Mapping) else None
    if not isinstance(depth, int) or not 0 <= depth <= MAX_LAYERS:
        raise StoredError(
            f"the run's config.model is {str(model)[:80]!r}; expected a section with a depth of at"
            f" most {MAX_LAYERS}"
        )
    for name, value in model.items():  # sizes are 32-bit numbers in a compiled program
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise StoredError(
                f"the run's config.model.{name} is {str(value)[:40]}; expected a number of at most"
                " 31 bits"
            )
    return model
