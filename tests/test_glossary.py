"""The glossary of metrics, as the model card and the reference print it."""

import itertools

import pytest

from jaxtrain import workload
from jaxtrain.telemetry import glossary
from tests.support import installed, toy


def test_a_meaning_stands_alone():
    """A model card sorts metrics by name, so no meaning may depend on the one before it."""
    groups = (
        glossary.STEP,
        glossary.DATA,
        glossary.SAVE,
        *map(glossary.of_workload, workload.shipped()),
    )
    for entry in itertools.chain(*groups):
        assert not entry.meaning.startswith(("the same", "its ")), entry.names


MEANINGS = [
    ("mae_loss", "bird", "test", "of objective mae, before"),
    ("grad_norm_encoder", "bird", "train", "below encoder alone"),
    ("chi2_mod_expected", "bird", "data", "the value of chi2_mod if"),
    ("perplexity_source_1", "language", "test", "perplexity on source number 1 of"),
    ("exact_accuracy_difficulty_3", "trm", "test", "difficulty class 3,"),
    ("audio_7", "audio_language", "test", "codebook 7"),
]


@pytest.mark.parametrize(
    ("name", "workload", "split", "told"),
    [pytest.param(*each, marks=installed.needs(each[1])) for each in MEANINGS],
)
def test_the_letters_of_a_meaning_are_filled_in(name, workload, split, told):
    assert told in glossary.meaning(name, workload=f"jaxtrain.workloads.{workload}", split=split)


def test_an_entry_without_a_metric_is_named():
    own = (glossary.Entry("loss", "loss", "…"), glossary.Entry("X_loss", "(?P<X>.+)_loss", "…"))
    assert glossary.without_metric(own, ["loss", "lr"]) == ["X_loss"]


def test_an_entry_whose_pattern_is_none_is_refused_by_name():
    with pytest.raises(
        workload.WorkloadError,
        match="Entry 'X_loss' has the pattern '.*', which is no regular expression: ",
    ):
        glossary.Entry("X_loss", "(?P<X>.+_loss", "…")


def test_an_entry_of_another_kind_is_named(monkeypatch):
    found = workload.Workload(None, None, glossary=(("loss", "loss", "its meaning"),))
    monkeypatch.setattr(workload, "of", lambda name: found)
    with pytest.raises(
        workload.WorkloadError,
        match=r"the glossary of tests.support.toy has \('loss', .* expected a jaxtrain.Entry",
    ):
        glossary.of_workload(toy.__name__)


SIGNS = [
    ("cross_entropy", "language", True),
    ("perplexity_source_1", "language", True),
    ("bits_per_byte", "language", True),
    ("accuracy", "language", False),
    ("code_golf/reward", "language", None),
    ("exact_accuracy_difficulty_3", "trm", False),
    ("lm_loss", "trm", True),
    ("audio_7", "audio_language", True),
    ("audio_accuracy_7", "audio_language", False),
    ("fmri_r", "giblet", False),
    ("video_raw", "giblet", True),
    ("lejepa_sigreg", "bird", True),
    ("probe_accuracy", "bird", False),
]


@pytest.mark.parametrize(
    ("name", "workload", "less"),
    [pytest.param(*sign, marks=installed.needs(sign[1])) for sign in SIGNS],
)
def test_the_better_direction_of_a_metric_is_known(name, workload, less):
    dotted = f"jaxtrain.workloads.{workload}"
    assert glossary.less_is_better(name, workload=dotted) is less
    wrong = [sign for sign in ("", "-") if glossary.wrong_sign(sign + name, workload=dotted)]
    assert wrong == ([] if less is None else ["" if less else "-"])
