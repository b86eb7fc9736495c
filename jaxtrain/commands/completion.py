"""Prints a script that completes jaxtrain's commands, flags, configs and fields in a shell.

    jaxtrain completion SHELL

    source <(jaxtrain completion bash)                                          in ~/.bashrc
    source <(jaxtrain completion zsh)                                           in ~/.zshrc, after compinit
    jaxtrain completion fish > ~/.config/fish/completions/jaxtrain.fish         once

    jaxtrain completion bash

It knows the fields of a config that all workloads share. Those of model and data differ.
"""

import contextlib
import dataclasses
import importlib
import io
import re
import shlex
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain import commands, configs
from jaxtrain.commands import arguments

ACTIONS = SHELLS = ("bash", "zsh", "fish")


class Words(NamedTuple):
    """The words that a shell may complete."""

    commands: Mapping[str, str]  # name -> its summary
    flags: Mapping[str, Sequence[str]]  # command -> its flags
    actions: Mapping[str, Sequence[str]]  # command -> choices of its first argument, if it has any
    configured: Sequence[str]  # the commands that take --config
    configs: Sequence[str]  # the names of shipped configs
    fields: Sequence[str]  # section.field


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain completion", __doc__)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    shell = parser.parse_args(argv).shell
    return arguments.run(lambda: _print(shell))


def _print(shell: str) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](words()), end="")
    return 0


def words() -> Words:
    """All of them, as this version has them: flags are read from each command's --help."""
    modules = {name: importlib.import_module(command.module) for name, command in commands.table().items()}
    actions = {name: list(getattr(module, "ACTIONS", ())) for name, module in modules.items()}
    helps = {name: help_of(module, actions[name]) for name, module in modules.items()}
    return Words(
        {name: (module.__doc__ or "").partition("\n")[0].rstrip(".") for name, module in modules.items()},
        {name: sorted(set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M))) for name, text in helps.items()},
        {name: names for name, names in actions.items() if names},
        [name for name, text in helps.items() if "--config=" in text.partition("\n\n")[0]],
        configs.names(),
        fields(),
    )


def help_of(module: types.ModuleType, actions: Sequence[str]) -> str:
    """The --help of a command, and then of each of its actions."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        for argv in (["--help"], *([action, "--help"] for action in actions)):
            with contextlib.suppress(SystemExit):
                module.main(argv)
    return text.getvalue()


def fields() -> list[str]:
    """The dotted names of all settings but those of model and data."""
    from jaxtrain import config

    found = []
    for field in dataclasses.fields(config.Config):
        if field.name in ("model", "data"):
            continue
        section: Any = field.default_factory
        if dataclasses.is_dataclass(section):
            found += [f"{field.name}.{inner.name}" for inner in dataclasses.fields(section)]
        else:
            found.append(field.name)
    return found


def bash(w: Words) -> str:
    """For bash, which passes only the part after the last = of a word."""
    return f"""\
# jaxtrain: completion for bash
_jaxtrain() {{
    local line=${{COMP_LINE:0:COMP_POINT}} flags
    local word=${{line##*[[:space:]]}} rest=${{COMP_WORDS[COMP_CWORD]}}
    [[ $rest == '=' ]] && rest=
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W {_quoted(w.commands)} -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{_cases(w.flags, "flags={}")}    esac
    if [[ $COMP_CWORD -eq 2 && $word != -* ]]; then
        case ${{COMP_WORDS[1]}} in
{_cases(w.actions, 'COMPREPLY=($(compgen -W {} -- "$word")); return')}        esac
    fi
    if [[ " {" ".join(w.configured)} " == *" ${{COMP_WORDS[1]}} "* ]]; then
        flags+=' --config='
        if [[ $word == --config=* ]]; then
            COMPREPLY=($(compgen -W {_quoted(w.configs)} -- "$rest") $(compgen -f -- "$rest"))
            return
        elif [[ $word == --config.* && $word != *=* ]]; then
            COMPREPLY=($(compgen -P --config. -S = -W {_quoted(w.fields)} -- "${{word#--config.}}"))
            compopt -o nospace
            return
        fi
    fi
    if [[ $word == -* && $word != *=* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
        [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
    else
        COMPREPLY=($(compgen -f -- "$rest"))
        compopt -o filenames
    fi
}}
complete -F _jaxtrain jaxtrain
"""


def zsh(w: Words) -> str:
    return f"""\
#compdef jaxtrain
_jaxtrain() {{
    local -a commands flags
    if (( CURRENT == 2 )); then
        commands=({" ".join(shlex.quote(f"{name}:{text}") for name, text in w.commands.items())})
        _describe command commands
        return
    fi
    case $words[2] in
{_cases(w.flags, "flags=({})", quoted=False)}    esac
    if (( CURRENT == 3 )); then
        case $words[2] in
{_cases(w.actions, "compadd -- {}; return", quoted=False)}        esac
    fi
    if [[ " {" ".join(w.configured)} " == *" $words[2] "* ]]; then
        if compset -P '--config='; then
            compadd -- {" ".join(w.configs)}
            _files -g '*.py'
            return
        elif compset -P '--config.'; then
            compadd -S = -- {" ".join(w.fields)}
            return
        fi
        [[ $PREFIX == -* ]] && compadd -S '' -- --config=
    fi
    if [[ $PREFIX == -* ]]; then compadd -- $flags; else _files; fi
}}
compdef _jaxtrain jaxtrain
"""


def fish(w: Words) -> str:
    lines = ["# jaxtrain: completion for fish"]
    lines += [
        f"complete -c jaxtrain -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
        for name, text in w.commands.items()
    ]
    for name, flags in w.flags.items():
        lines += [f"complete -c jaxtrain -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}" for flag in flags]
    lines += [f"complete -c jaxtrain -n '__fish_seen_subcommand_from {n}' -f -a '{' '.join(a)}'" for n, a in w.actions.items()]
    taken = f"-n '__fish_seen_subcommand_from {' '.join(w.configured)}'"
    lines.append(f"complete -c jaxtrain {taken} -l config -r -a '{' '.join(w.configs)}'")
    lines += [f"complete -c jaxtrain {taken} -l config.{field} -x" for field in w.fields]
    return "\n".join(lines) + "\n"


def _cases(words: Mapping[str, Sequence[str]], then: str, *, quoted: bool = True) -> str:
    """A line of ``case`` for each command: its words, and the action ``then``."""
    each = ((name, _quoted(its) if quoted else " ".join(its)) for name, its in words.items())
    return "".join(f"        {name}) {then.format(its)} ;;\n" for name, its in each)


def _quoted(names: Iterable[str]) -> str:
    return shlex.quote(" ".join(names))
