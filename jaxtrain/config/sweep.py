"""Many configs from one file: the points of a sweep."""

import os
from collections.abc import Iterable, Mapping

from jaxtrain.config.build import function_of, import_file, load, read
from jaxtrain.config.consistency import ConfigError
from jaxtrain.config.schema import Config


def sweeps(
    source: str, overrides: Iterable[tuple[str, str]] = ()
) -> list[tuple[Config, list[tuple[str, str]]]]:
    """Check every point of a config's sweep, and return them: (config, its overrides).

    The file's function ``sweeps()`` yields dictionaries, dotted path -> value. A point without a
    workdir of its own gets <workdir>/000 and so on, and so does checkpoint.folder. Raises
    ConfigError with the errors of all points, for a file without the function or points, for a
    value given and swept, and for a shared workdir or checkpoint.folder.
    """
    overrides = list(overrides)
    file, module, _ = import_file(source)
    points_of = function_of(
        module, file, "sweeps", "sweeps(), which yields dictionaries of overrides"
    )
    base_config = load(source, overrides)
    base = os.path.abspath(base_config.workdir)
    base_folder = base_config.checkpoint.folder
    points: list[tuple[Config, list[tuple[str, str]]]] = []
    problems: list[tuple[str, str]] = []
    for i, point in enumerate(points_of()):
        if not isinstance(point, Mapping):
            example = "{'optim.lr': 1e-3}"
            text = f"sweep {i} is {point!r}; expected a dictionary, for example {example}"
            problems.append(("", text))
            continue
        for path, _ in overrides:
            if path in point:
                problems.append((path, f"is given, and sweep {i} sets it too"))
        outputs = {"workdir": os.path.join(base, f"{i:03}")}
        if base_folder:
            outputs["checkpoint.folder"] = os.path.join(base_folder, f"{i:03}")
        texts = list(overrides)
        for path, value in {**outputs, **point}.items():
            texts.append((path, value if isinstance(value, str) else repr(value)))
        try:
            config, problems_of_point = read(source, texts)
        except ConfigError as error:
            problems_of_point = list(error.problems)
        else:
            points.append((config, texts))
        for path, text in problems_of_point:
            problems.append((path, f"{text} (sweep {i})"))
    workdirs = [os.path.abspath(config.workdir) for config, _ in points]
    folders = [config.checkpoint.folder for config, _ in points if config.checkpoint.folder]
    for path, values in (("workdir", workdirs), ("checkpoint.folder", folders)):
        repeated = {value for value in values if values.count(value) > 1}
        for value in sorted(repeated):
            problems.append((path, f"is {value!r} in more than one sweep"))
    if not points and not problems:
        problems.append(("", f"function sweeps of {source} yields nothing"))
    if problems:
        raise ConfigError(problems)
    return points
