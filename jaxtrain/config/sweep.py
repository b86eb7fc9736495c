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
    points, problems = [], []
    for i, point in enumerate(points_of()):
        if not isinstance(point, Mapping):
            problems.append(
                (
                    "",
                    (
                        f"sweep {i} is {point!r}; expected a dictionary, for example {{'optim.lr':"
                        " 1e-3}"
                    ),
                )
            )
            continue
        problems += [
            (path, f"is given, and sweep {i} sets it too") for path, _ in overrides if path in point
        ]
        outputs = {"workdir": os.path.join(base, f"{i:03}")}
        if base_folder:
            outputs["checkpoint.folder"] = os.path.join(base_folder, f"{i:03}")
        point = {**outputs, **point}
        texts = [
            *overrides,
            *(
                (path, value if isinstance(value, str) else repr(value))
                for path, value in point.items()
            ),
        ]
        try:
            config, found = read(source, texts)
        except ConfigError as error:
            found = list(error.problems)
        else:
            points.append((config, texts))
        problems += [(path, f"{text} (sweep {i})") for path, text in found]
    workdirs = [os.path.abspath(config.workdir) for config, _ in points]
    folders = [config.checkpoint.folder for config, _ in points if config.checkpoint.folder]
    for path, values in (("workdir", workdirs), ("checkpoint.folder", folders)):
        shared = sorted({value for value in values if values.count(value) > 1})
        problems += [(path, f"is {value!r} in more than one sweep") for value in shared]
    if not points and not problems:
        problems.append(("", f"function sweeps of {source} yields nothing"))
    if problems:
        raise ConfigError(problems)
    return points
