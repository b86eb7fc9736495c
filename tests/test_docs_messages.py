"""Each message that docs/troubleshooting.md quotes is one that the code prints."""

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"  # a placeholder of a message
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)


def texts_of(tree: ast.AST, *, top: bool = True) -> Iterator[str]:
    """The text of each string in a module, with a gap for each placeholder."""
    if isinstance(tree, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else GAP for v in tree.values)
        yield "".join(map(str, parts))
        for value in tree.values:
            if isinstance(value, ast.FormattedValue):
                yield from texts_of(value.value, top=False)
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield re.sub(r"%[dgsr]|%\.\df", GAP, tree.value)
    elif top or not isinstance(tree, SCOPES):
        for child in ast.iter_child_nodes(tree):
            yield from texts_of(child, top=False)


def printed() -> Iterator[str]:
    """The strings of each function in one text, in their order, as a message may have parts."""
    for package in ("jaxtrain", "loaders"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for scope in ast.walk(ast.parse(path.read_text())):
                if isinstance(scope, SCOPES):
                    yield GAP.join(texts_of(scope))
    for path in sorted((ROOT / "rust" / "core" / "src").rglob("*.rs")):
        literals = re.findall(r'"((?:\\.|[^"\\])*)"', path.read_text())
        yield from (re.sub(r"\{[^}]*\}", GAP, text).replace("\\n", "\n") for text in literals)


def quoted() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def is_printed(message: str, texts: list[str]) -> bool:
    """Whether the parts of a message between its … are in one text, in their order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" .;:,()")]
    pattern = re.compile(".*?".join(parts), re.S)
    return any(pattern.search(text) for text in texts)


def test_each_quoted_message_is_in_the_code():
    texts = list(printed())
    assert len(quoted()) > 20
    assert [message for message in quoted() if not is_printed(message, texts)] == []


def test_a_message_that_nothing_prints_is_found():
    texts = list(printed())
    assert not is_printed("the disk … has no more rooms", texts)
    assert not is_printed("to resume … could not be written:", ["could not be written:\0to resume"])
