"""Messages about ranges and choices: the wrong values, and the text."""

from types import SimpleNamespace

import pytest

from loaders.io import checks

NAN, INFINITY = float("nan"), float("inf")


def found(check, value, *arguments) -> list[tuple[str, str]]:
    return list(check(SimpleNamespace(a=value), *arguments, "a"))


@pytest.mark.parametrize(
    "check, arguments, right, wrong, text",
    [
        (checks.at_least, (1,), (1, 2), (0, -1, NAN), "it must be at least 1"),
        (checks.not_negative, (), (0, 0.5), (-1, -0.1, NAN), "it must not be negative"),
        (checks.positive, (), (0.1, 5), (0, -1, INFINITY, NAN), "it must be a positive number"),
        (checks.within, ("[0, 1)",), (0, 0.5), (1, -0.1, NAN), "it must lie in [0, 1)"),
        (checks.within, ("(0, 600]",), (0.1, 600), (0, 601, NAN), "it must lie in (0, 600]"),
    ],
)
def test_a_number_out_of_range_is_named_with_the_range(check, arguments, right, wrong, text):
    assert not [value for value in right if found(check, value, *arguments)]
    for value in wrong:
        assert found(check, value, *arguments) == [("a", f"is {value}; {text}")]


def test_every_field_is_looked_at():
    section = SimpleNamespace(a=0, b=1, c=0)
    assert [name for name, _ in checks.at_least(section, 1, "a", "b", "c")] == ["a", "c"]


def test_an_unknown_name_comes_with_those_that_are_allowed_and_the_nearest():
    allowed = ("constant", "cosine")
    assert found(checks.choice, "cosine", allowed) == []
    assert found(checks.choice, "cosin", allowed) == [
        ("a", "is 'cosin'; expected one of: constant, cosine; did you mean 'cosine'?")
    ]
    assert found(checks.choice, "x", allowed) == [
        ("a", "is 'x'; expected one of: constant, cosine")
    ]
    assert found(checks.choice, 3, (4, 8)) == [("a", "is 3; expected one of: 4, 8")]


def test_problems_of_a_part_are_reported_by_its_path():
    assert list(checks.under("sources[0]", [("share", "is 0")])) == [("sources[0].share", "is 0")]
