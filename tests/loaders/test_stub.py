"""loaders/_rust.pyi describes the compiled extension: the same names and parameters, and the
beginnings of its docstrings."""

import ast
import dataclasses
import inspect
import pathlib
import types

import numpy as np
import pytest

from loaders import _rust
from loaders.audio.spectrogram import Config, pipeline_settings
from tests.support import corpus

STUB = ast.parse((pathlib.Path(_rust.__file__).parent / "_rust.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
MEMBERS = {
    (name, sub.name): sub
    for name, node in CLASSES.items()
    for sub in node.body
    if isinstance(sub, ast.FunctionDef)
}
PUBLIC = {
    (name, member): node for (name, member), node in MEMBERS.items() if not member.startswith("__")
}


def parameters(node: ast.FunctionDef) -> list[str]:
    return [
        argument.arg
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    ]


def test_the_stub_has_every_name_of_the_extension():
    constants = {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}
    public = {name for name in dir(_rust) if not name.startswith("_")}
    assert public == constants | set(FUNCTIONS) | set(CLASSES)
    for name in CLASSES:
        members = {member for member in vars(getattr(_rust, name)) if not member.startswith("_")}
        assert members == {member for owner, member in PUBLIC if owner == name}


def test_the_docstrings_are_those_of_the_extension_and_more():
    """The extension has the first paragraph. The stub also has the arguments, results and
    errors."""
    named = {name: (getattr(_rust, name), node) for name, node in (FUNCTIONS | CLASSES).items()}
    named |= {
        f"{name}.{member}": (getattr(getattr(_rust, name), member), node)
        for (name, member), node in PUBLIC.items()
    }
    for name, (value, node) in {"_rust": (_rust, STUB), **named}.items():
        assert inspect.getdoc(value) == (ast.get_docstring(node) or "").partition("\n\n")[0], name


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_every_docstring_begins_with_a_sentence(name):
    for text in [inspect.getdoc(getattr(_rust, name))] + [
        ast.get_docstring(MEMBERS[key]) for key in PUBLIC if key[0] == name
    ]:
        assert text and text.splitlines()[0].rstrip().endswith((".", ":")), text


def test_the_parameters_are_those_of_the_extension():
    for name, node in FUNCTIONS.items():
        assert list(inspect.signature(getattr(_rust, name)).parameters) == parameters(node), name
    for name in CLASSES:
        built = list(inspect.signature(getattr(_rust, name)).parameters)
        assert built == parameters(MEMBERS[name, "__init__"])[1:], name
    for (name, member), node in PUBLIC.items():
        value = getattr(getattr(_rust, name), member)
        if callable(value):
            assert list(inspect.signature(value).parameters) == parameters(node), (name, member)


def test_the_extension_reads_exactly_the_settings_that_there_are(tmp_path):
    table = corpus.table([corpus.wav(0)], [0])
    index = _rust.Index([corpus.write(tmp_path / "0.arrow", table)])
    rows = np.arange(1)
    settings = pipeline_settings(Config(), rows, 1, [(0, 1)], seed=0, train=True)
    read = []

    class Recorder:
        def __getattr__(self, name):
            read.append(name)
            return getattr(settings, name)

    _rust.Pipeline(index, Recorder()).close()
    names = [field.name for field in dataclasses.fields(settings)]
    assert sorted(read) == sorted(names)
    without_depth = types.SimpleNamespace(**settings.__dict__)
    del without_depth.depth
    with pytest.raises(AttributeError, match="depth"):
        _rust.Pipeline(index, without_depth)
    with pytest.raises(TypeError, match="Settings.batch"):
        _rust.Pipeline(index, dataclasses.replace(settings, batch=-1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'deep'"):
        dataclasses.replace(settings, deep=3)
