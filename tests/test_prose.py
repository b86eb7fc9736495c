"""The prose of docs and docstrings is plain English: short sentences, named subjects, "if" for
conditions.

    python -m tests.test_prose [FOLDER or FILE …]

prints the figures of each folder. For each folder or file that is named, it lists the sentences to
rewrite, with file and line. Code blocks, tables, headings and inline code are left out.
"""

import ast
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
# Files and folders that are clean. Add one when `python -m tests.test_prose IT` ends its first line
# with "clean".
CLEAN = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs",
    "jaxtrain",
    "loaders",
    "tools",
    "rust/core",
    "rust/decode",
    "rust/python",
    "rust/fuzz/fuzz_targets",
)
# Its tables have a sentence in each row, made from the comments of dataclasses.
REFERENCE = ROOT / "docs" / "reference.md"
# A meaning that begins with such a word cannot be read without the unit or the row above.
DEPENDENT = "After|And|Before|Between|By|For|From|In|Of|On|Or|Over|That|To|Which|Whose|With|Within"

# The limits are the highest figures of nanodo, seqax, big_vision, equinox and kauldron.
LIMITS = {
    "headless, in 10,000 words": 12,
    "where for if, in 10,000 words": 8,
    "semicolons, in 100 sentences": 8,
    "median words": 20,
}
LONGEST = 40
OUT = re.compile(r"\b(shall|told|said|had|meant|anew|beside|thereby|therein|whereby)\b", re.I)
# A question may begin with the word `what`.
HEADLESS = re.compile(
    r"\b(what|whoever|whatever|whichever|those (?:that|who|whose)|that which)\b(?![^.]*\?)", re.I
)
# The word `where` is about a place after these words, and explains a formula before a symbol.
PLACE = (
    "says?|knows?|shows?|sees?|finds?|decides?|lives?|lies?|stands?|to|from|of|about|and|is|or"
    "|folder|place|line|file|machine"
)
WHERE = re.compile(rf"(?<!\w)(?<!-)((?:{PLACE}) )?where\b(?! `| \w = )", re.I)


class Sentence(NamedTuple):
    place: str  # file:line
    text: str

    @property
    def words(self) -> int:
        return len([word for word in self.text.split() if re.search(r"\w", word)])


def paragraphs(text: str, markdown: bool) -> Iterator[tuple[int, str]]:
    """Line number and text of each paragraph and list item."""
    if markdown:
        for block in (
            r"(?s)\A---\n.*?\n---$",
            r"(?s)^( *)```.*?^ *```$",
            r"(?s)<!--.*?-->",
            r"^\s*(?:\||#|\?\?\?|!!!|:::).*$",
        ):
            text = re.sub("(?m)" + block, lambda found: "\n" * found[0].count("\n"), text)
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(
        r"``[^`]+``|`[^`]+`|https?://\S+", lambda found: "`x`" + "\n" * found[0].count("\n"), text
    )
    start, kept = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        code = not markdown and re.match(r" {4,}|.*\S {3,}\S|.*[│┤└]", line)
        if kept and (code or not line.strip() or re.match(r"\s*([-*]|\d+\.) |\s+\w+: ", line)):
            yield start, " ".join(kept)
            kept = []
        if line.strip() and not code:
            start = start if kept else number
            kept.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())


def sentences(path: pathlib.Path) -> list[Sentence]:
    """The sentences of a page, of the docstrings of a Python module, or of the doc comments of a
    Rust file."""
    texts = [(0, path.read_text())]
    if path == REFERENCE:
        texts = [(0, re.sub(r"(?m)^\|.* \| (.*) \|$", r"\n\1\n", texts[0][1]))]
    if path.suffix == ".rs":
        texts = [(0, re.sub(r"(?m)^ *//[/!] ?|^(?! *//[/!]).*", "", texts[0][1]))]
    if path.suffix == ".py":
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(ast.parse(texts[0][1])) if isinstance(node, kinds)]
        texts = [
            (node.body[0].lineno - 1, doc) for node in nodes if (doc := ast.get_docstring(node))
        ]
    found = [
        (offset + line, each)
        for offset, text in texts
        for line, each in paragraphs(text, path.suffix in (".md", ".rs"))
    ]
    split = [
        (line, sentence)
        for line, each in found
        for sentence in re.split(r"(?<=[.?!:])\W*\s+(?=[\"“(*]*[A-Z`])", each)
    ]
    return [
        Sentence(f"{path}:{line}", text) for line, text in split if re.search(r"[a-z]{2}", text)
    ]


def read(area: str, suffixes: tuple[str, ...] = (".py", ".md", ".rs")) -> list[Sentence]:
    files = [ROOT / area] if (ROOT / area).is_file() else sorted((ROOT / area).rglob("*"))
    files = [file for file in files if file.suffix in suffixes]
    return [
        s._replace(place=s.place.removeprefix(f"{ROOT}/"))
        for file in files
        for s in sentences(file)
    ]


def figures(found: list[Sentence]) -> dict[str, float]:
    """Figure → value, as in `LIMITS`."""
    in_10_000_words = 10_000 / max(sum(s.words for s in found), 1)
    headless = sum(len(HEADLESS.findall(s.text)) for s in found) * in_10_000_words
    where = sum(not place for s in found for place in WHERE.findall(s.text)) * in_10_000_words
    semicolons = 100 * sum(s.text.count(";") for s in found) / max(len(found), 1)
    return dict(
        zip(
            LIMITS,
            (headless, where, semicolons, statistics.median([s.words for s in found] or [0])),
            strict=True,
        )
    )


def faults(found: list[Sentence]) -> list[str]:
    """The sentences that are too long, and those with a word that is out."""
    long = [f"{s.place}: {s.words} words: {s.text}" for s in found if s.words > LONGEST]
    return long + [
        f'{s.place}: "{match[0]}": {s.text}' for s in found for match in OUT.finditer(s.text)
    ]


def over(found: list[Sentence]) -> dict[str, float]:
    return {name: value for name, value in figures(found).items() if value > LIMITS[name]}


def test_clean_areas_stay_plain():
    for suffix in (".md", ".py", ".rs"):
        found = [s for area in CLEAN for s in read(area, (suffix,))]
        assert not faults(found)
        assert not over(found), f"python -m tests.test_prose {' '.join(CLEAN)} lists the sentences"


def test_each_meaning_in_the_reference_stands_alone():
    fields, *_ = REFERENCE.read_text().partition("## Columns of tables")
    meanings = [line.split(" | ")[-1] for line in fields.splitlines() if line.startswith("| `")]
    assert len(meanings) > 400
    assert not [meaning for meaning in meanings if re.match(rf"({DEPENDENT})\b", meaning)]


def test_code_and_tables_are_not_measured(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# What\n\nIt runs `what; shall` on\n[one](two) GPU. Whoever asks; where it is"
        " not.\n\n```\nshall\n```\n| what |\n"
    )
    assert [(s.place, s.words) for s in sentences(page)] == [(f"{page}:3", 6), (f"{page}:3", 6)]
    assert all(figures(sentences(page)).values())
    assert not faults(sentences(page))
    rust = tmp_path / "rust.rs"
    rust.write_text(
        '//! It runs.\n\nfn f() { what("Whoever asks.") } // shall\n    /// Whoever asks\n    ///'
        " is told.\n    fn g() {}\n"
    )
    assert [(s.place, s.words) for s in sentences(rust)] == [(f"{rust}:1", 2), (f"{rust}:4", 4)]
    assert len(faults(sentences(rust))) == 1


def main(areas: list[str]) -> None:
    folders = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("jaxtrain/*/"))
    for area in areas or ["README.md", "CONTRIBUTING.md", "docs", *folders, "loaders", "tools"]:
        found = read(area)
        state = (
            "clean"
            if not over(found) and not faults(found)
            else f"{len(faults(found))} sentences to rewrite"
        )
        print(
            f"{area}: {', '.join(f'{value:.0f} {name}' for name, value in figures(found).items())}:"
            f" {state}"
        )
        for line in faults(found) if areas else ():
            print(line)
        for name, pattern in (
            ("headless", HEADLESS),
            ("where", WHERE),
            ("semicolon", re.compile("(?!);|()(?<=;)")),
        ):
            hits = [
                s
                for s in found
                if any(name == "headless" or not place for place in pattern.findall(s.text))
            ]
            print(
                *(f"{s.place}: {name}: {s.text}" for s in hits if areas),
                sep="\n",
                end="\n" if areas and hits else "",
            )


if __name__ == "__main__":
    main(sys.argv[1:])
