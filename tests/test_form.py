"""The form of the code: statements that a reader holds at once, and names that say something.

The limits are near the values of code bases of this field that engineers hold up as examples.
"""

import ast
import io
import pathlib
import statistics
import subprocess
import tokenize
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
COLUMNS = 100
SKIP = "# fmt: skip"
SIMPLE = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Return,
    ast.Expr,
    ast.Raise,
    ast.Assert,
    ast.Delete,
)
COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
# Names that say nothing of the value: a reader has to find out elsewhere what was found.
VAGUE = set(
    "found each given about own known named kept before after rest others several one two both it"
    " its which other same made taken asked told said seen done used needed wanted meant held here"
    " there what whose whole these those them such more less many few written read put got laid"
    " drawn placed chosen picked allowed refused passed counted shown".split()
)


class Form(NamedTuple):
    tokens_per_statement: float
    median_nodes: float  # syntax nodes of a simple statement
    large_nodes: float  # 90th percentile
    comprehensions: float  # per 1,000 statements
    conditionals: float  # conditional expressions per 1,000 statements
    vague: float  # per 1,000 assigned names
    long_signatures: int  # functions with more than 8 parameters


def tracked(*patterns: str) -> list[pathlib.Path]:
    command = ["git", "-C", str(ROOT), "ls-files", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names]


def docstrings(tree: ast.AST) -> set[int]:
    """The lines on which docstrings begin."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                lines.add(node.body[0].lineno)
    return lines


def count_tokens(source: str, tree: ast.AST) -> int:
    """Tokens of code: without comments, docstrings and layout."""
    skipped = docstrings(tree)
    n_tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in skipped
        n_tokens += token.type not in LAYOUT and not is_docstring
    return n_tokens


def measure(sources: list[str]) -> Form:
    n_tokens = n_statements = n_comprehensions = n_conditionals = n_long_signatures = 0
    sizes: list[int] = []
    assigned: list[str] = []
    for source in sources:
        tree = ast.parse(source)
        n_tokens += count_tokens(source, tree)
        for node in ast.walk(tree):
            n_statements += isinstance(node, ast.stmt)
            n_comprehensions += isinstance(node, COMPREHENSIONS)
            n_conditionals += isinstance(node, ast.IfExp)
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, SIMPLE) and not is_text:
                sizes.append(sum(1 for _ in ast.walk(node)))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                n_long_signatures += len(node.args.args) + len(node.args.kwonlyargs) > 8
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assigned.append(node.id.lstrip("_"))
    n_vague = sum(name in VAGUE for name in assigned)
    return Form(
        tokens_per_statement=n_tokens / n_statements,
        median_nodes=statistics.median_high(sizes),
        large_nodes=sorted(sizes)[int(0.9 * len(sizes))],
        comprehensions=1000 * n_comprehensions / n_statements,
        conditionals=1000 * n_conditionals / n_statements,
        vague=1000 * n_vague / max(len(assigned), 1),
        long_signatures=n_long_signatures,
    )


def test_statements_are_held_at_once_and_names_say_something():
    form = measure([path.read_text() for path in tracked("jaxtrain/*.py", "loaders/*.py")])
    assert form.tokens_per_statement <= 11.0
    assert form.median_nodes <= 12
    assert form.large_nodes <= 25
    assert form.comprehensions <= 45
    assert form.conditionals <= 30
    assert form.vague <= 15
    assert form.long_signatures <= 10


def test_no_line_is_wider_than_a_page():
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked("*.py", "*.pyi", ":!docs/notebooks")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not wide


def test_only_parameter_tables_have_a_layout_of_their_own():
    skipped = {}
    for path in tracked("jaxtrain/*.py", "loaders/*.py", "tools/*.py", "configs/*.py"):
        if n_skips := path.read_text().count(SKIP):
            skipped[str(path.relative_to(ROOT))] = n_skips
    assert sum(skipped.values()) <= 40
    assert not [name for name in skipped if "Spec(" not in (ROOT / name).read_text()]


def test_the_measure_sees_what_it_counts():
    dense = "found = [f(x) if x else 0 for x in (a or {}).get(b, ())]  # why\n"
    form = measure([dense])
    # of two assigned names, found and x, one is vague
    assert (form.comprehensions, form.conditionals, form.vague) == (1000, 1000, 500)
    assert form.median_nodes == 28 and form.tokens_per_statement == 29
    plain = '"""A docstring."""\nrows = table.read()\nfor row in rows:\n    print(row)\n'
    form = measure([plain])
    assert (form.comprehensions, form.conditionals, form.vague) == (0, 0, 0)
    # a docstring, an assignment, a loop and a call are four statements
    assert form.tokens_per_statement == 16 / 4
    signature = ", ".join("abcdefghi")
    assert measure([f"def f({signature}):\n    return a\n"]).long_signatures == 1
