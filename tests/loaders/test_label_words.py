"""Labels and cells that deny, doubt or omit an answer differ from those that do not."""

import pytest

from loaders.audio.recordings import label_words
from loaders.audio.recordings.answer_columns import AnswerColumn

NONE = ("nocall", "No ID", "no bird song", "No detection", "keine V\u00f6gel", "no calls detected")
DENIED = (
    "no wren",
    "not_wren",
    "NoWren",
    "non-bird",
    "wren absent",
    "wren NOT PRESENT",
    "wren (not)",
    "wren: no",
    "wren=0",
    "-wren",
    "!wren",
    "wren_FP",
    "kein Zaunk\u00f6nig",
    "pas de merle",
    "geen merel",
)
OPEN = (
    "unknown",
    "????",
    "wren?",
    "?wren",
    "cf. wren",
    "Troglodytes cf. troglodytes",
    "possible wren",
    "wren (probable)",
    "unknown warbler",
    "wren or robin",
    "~wren",
    "vermutlich Amsel",
    "peut-\u00eatre merle",
)
NAMES = (
    "wren",
    "Passer",
    "Pas dom",
    "noisy miner",
    "NOPA",
    "NoCa",
    "No. 1",
    "no",
    "Pluvier d'or",
    "Certhia sp.",
    "Reed-warbler",
    "false killer whale",
)


@pytest.mark.parametrize("label", [*NONE, *DENIED, *OPEN, *NAMES])
def test_a_label_says_none_not_or_perhaps(label):
    says = (
        label_words.says_none(label),
        label_words.denies(label),
        label_words.says_unknown(label),
    )
    assert says == (label in NONE, label in DENIED, label in OPEN)


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("certainty", {"high": "yes", "very high": "yes", "medium": "skip", "low": "skip"}),
        ("ID confidence", {"confident": "yes", "not confident": "skip", "low-medium": "skip"}),
        ("confidence", {"0.9": None, "1.0": None, "high": "yes", "maybe": "skip"}),
        ("sure", {"1": "yes", "0": "skip", "": "skip", "wrong": "no"}),
        ("uncertain", {"1": "skip", "0": "yes", "": "yes", "?": "skip", "x": "skip"}),
        ("uncertainty", {"high": "skip", "low": "yes", "medium": "skip"}),
        ("identificationQualifier", {"": "yes", "cf.": "skip", "aff. robin": "skip"}),
        ("verified_by", {"Anna": "yes", "": "skip", "-": "skip", "nobody": "skip"}),
        ("Review Date", {"2024-05-01": "yes", "": "skip", "not yet": "skip"}),
        ("gepr\u00fcft von", {"Anna": "yes", "": "skip"}),
        ("rejected", {"yes": "no", "no": "yes", "": "yes", "pending": "skip"}),
        ("verified", {"yes": "yes", "no": "no", "": "skip", "Anna": None}),
    ],
)
def test_a_cell_answers_by_the_name_of_its_column(name, cells):
    column = AnswerColumn(name, list(cells))
    assert {text: column.verdict(text) for text in cells} == cells
