"""One thing has one name, the field's term, in identifiers, in module names and in messages."""

import ast
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted(
    path
    for area in ("jaxtrain", "loaders", "tools", "configs")
    for path in (ROOT / area).rglob("*.py")
)
CRATES = ("core", "decode", "python", "fuzz/fuzz_targets")
RUST = sorted(path for crate in CRATES for path in (ROOT / "rust" / crate).rglob("*.rs"))
# A word of a name -> the term for it.
TERMS = {
    "carry": "model_state",
    "streak": "skipped",
    "touched": "sparse_rows",
    "judge": "score, decide or grade",
    "judged": "scored or grade",
    "trial": "draw",
    "owner": "lease, parameter or name",
    "rival": "contender",
    "silence": "timeout",
    "meet": "await_peers",
    "meeting": "rendezvous or barrier",
    "guest": "unauthenticated peer",
    "stranger": "unauthenticated peer",
    "alike": "neighbours or uniform",
    "fewest": "smallest or MIN_",
    "nobody": "none",
    "dear": "expensive",
    "mistake": "error",
    "mistakes": "errors",
    "told": "reported",
    "said": "reason or stated",
    "begun": "started",
    "mend": "fix",
    "anew": "again",
}
# The words that a file or folder uses in the meaning of its field.
EXACT = {
    ("carry", "jaxtrain/dissect.py"): "of lax.scan",
    ("carry", "jaxtrain/nn/ring.py"): "of lax.scan",
    ("carry", "jaxtrain/plan/bound.py"): "of lax.scan",
    ("carry", "jaxtrain/workloads/bird/inference/fit.py"): "of lax.scan",
    ("silence", "loaders/audio/spectrogram.py"): "of a recording",
    ("silence", "loaders/audio/pipeline_settings.py"): "of a recording",
    ("silence", "rust/"): "of a recording",
    ("fewest", "tools/trm_table.py"): "of a range given on the command line",
}
MODULES = (
    "steps make begin alike shown whole late room there kept apart meeting meetings mistakes facts"
    " fields owner utils"
).split()
ENTRIES = ("__init__", "__main__", "mod", "lib", "tests")  # names that Python and Rust give
# Files that share a base name: a rule for their folders, and its reason.
SHARED = {
    r"rust/(python/src|fuzz/fuzz_targets)/\w+": (
        "a binding and a target are named after the module that they call"
    ),
    r"jaxtrain/workloads/[^/]+/\w+": "the rooms of a workload have the same names in each",
    r".*/commands/\w+": "a command is named after the module that it calls",
    r"configs/\w+|tools/esc10_folds": (
        "a config is named after its workload, and a tool after its config"
    ),
    r"tools/torch_steps/\w+": "a side of the comparison is named after its workload",
}
# Phrases of messages, docstrings and comments -> the term.
PHRASES = {
    r"\bmistakes?\b": "error",
    r"\bgo(es|ing)? on from\b": "resume from",
    r"\bis wanted\b": "is expected",
    r"\broll call\b": "rendezvous",
    r"\bmend(s|ed|ing)?\b": "fix",
}


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def names(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, imports, arguments, variables and attributes in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.alias):
            yield node.asname or ""
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def rust_names(source: str) -> set[str]:
    """Every identifier of Rust code outside its strings and comments."""
    return set(re.findall(r"\b[A-Za-z_]\w*", re.sub(r'"(?:\\.|[^"\\])*"|//.*', " ", source)))


def wrong_names(source: str, file: str = "x.py") -> set[str]:
    read = rust_names(source) if file.endswith(".rs") else names(ast.parse(source))
    found = {(word, name) for name in read for word in words(name) if word in TERMS}
    meant = {word for word, place in EXACT if file.startswith(place)}
    return {f"{file}: {name}; write {TERMS[word]}" for word, name in found if word not in meant}


def test_names_have_the_fields_terms():
    assert not sorted(
        x for path in (*FILES, *RUST) for x in wrong_names(path.read_text(), relative(path))
    )
    assert (
        wrong_names("class Trial: ...")
        and wrong_names("f(streak=1)")
        and wrong_names("self.n_mistakes = 1")
        and not wrong_names("trials = judge(x)")
    )


def test_names_of_rust_are_read_outside_strings_and_comments():
    """Each planted line has a wrong name, and no other line has one."""
    for planted in (
        "let told = 1;",
        "struct SlabOwner(u8);",
        "const FEWEST: u8 = 1;",
        'fn f(&self) { g("", begun) }',
        "x.streak += 1;",
    ):
        assert wrong_names(planted, "rust/x.rs"), planted
    for fine in (
        "// told",
        "let x = 1; // the owner",
        'f("\\"told\\""); // "',
        "let silence = 1;",
        "let retold = 1;",
    ):
        assert not wrong_names(fine, "rust/x.rs"), fine
    assert wrong_names("let silence = 1;", "other/x.rs")


def wrong_phrases(text: str, file: str = "") -> list[str]:
    return [
        f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}; write {term}"
        for phrase, term in PHRASES.items()
        for match in re.finditer(phrase, text, re.I)
    ]


def test_messages_and_docs_have_the_fields_terms():
    pages = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *sorted((ROOT / "docs").glob("**/*.md")),
    ]
    files = [path for path in (*FILES, *RUST, *pages) if "results" not in path.parts]
    assert not [
        found for path in files for found in wrong_phrases(path.read_text(), relative(path))
    ]
    assert (
        wrong_phrases("/// The roll call.")
        and wrong_phrases('Err("a mistake")')
        and not wrong_phrases("/// No mistaken one.")
    )


def test_a_name_of_a_module_says_what_is_in_it_and_is_given_once():
    assert not [relative(path) for path in (*FILES, *RUST) if path.stem in MODULES]
    shared = defaultdict(list)
    for path in (*FILES, *RUST):
        name = relative(path.with_suffix(""))
        if path.stem not in ENTRIES and not any(re.fullmatch(rule, name) for rule in SHARED):
            shared[path.name].append(name)
    assert not {file: found for file, found in shared.items() if len(found) > 1}


def test_only_workloads_and_loaders_have_a_class_named_config():
    """`LoaderModule` asks for the name. The whole config is `schema.Config`."""
    named = {
        relative(path): path.read_text()
        for path in FILES
        if re.search(r"^class Config\b", path.read_text(), re.M)
    }
    others = [
        file
        for file in named
        if not re.match(r"jaxtrain/workloads/\w+/model\.py|loaders/\w+/\w+\.py", file)
    ]
    assert others == ["jaxtrain/config/schema.py"]
