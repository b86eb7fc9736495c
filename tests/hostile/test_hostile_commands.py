"""No command crashes, hangs, or reads forbidden files with files of any content (attacks.py lists
the commands)."""

import os
import pathlib
import shutil

import pytest

from jaxtrain import commands
from tests.hostile import damage
from tests.hostile.attacks import ATTACKS, HARMLESS, PROBES
from tests.hostile.harness import ROOT

NAMED = {attack.name: attack for attack in (*ATTACKS, *PROBES)}
PAYLOAD = (
    "import pathlib\npathlib.Path(__file__).with_name('it-ran').write_text('')\nraise"
    " SystemExit(55)\n"
)


def test_every_command_is_attacked():
    attacked = {attack.argv[0] for attack in ATTACKS}
    missing = set(commands.table()) - attacked - set(HARMLESS)
    assert not missing, (
        f"`jaxtrain {sorted(missing)[0]}` is in no list of tests/hostile/attacks.py. If it reads"
        " files, add an Attack to ATTACKS there (its arguments, and a function of inputs.py that"
        " makes a small input); else a line to HARMLESS."
    )
    assert not (attacked | set(HARMLESS)) - set(commands.table()), "a command of the lists is gone"


def attack_with(attack, cases, zygote, whole, tmp_path):
    """Runs every case. Returns the problems of all of them."""
    problems = []
    for number, case in enumerate(cases):
        place = pathlib.Path(os.path.realpath(tmp_path)) / f"case-{number}"
        _set_up(place)
        (
            damage.make(case, whole(attack.make), place / "input")
            if case
            else shutil.copytree(whole(attack.make), place / "input")
        )
        folders = {"input": place / "input", "out": place / "out", "root": ROOT}
        for make in attack.beside:
            name = make.__name__
            if not (place / name).exists():
                shutil.copytree(whole(make), place / name, symlinks=True)
            folders[make.__name__] = place / name
        argv = [part.format(**folders) for part in attack.argv]
        outcome = zygote.run(argv, place, protected=place / damage.OUTSIDE)
        if outcome.problems or (case is None and outcome.code != 0):
            problems.append(
                f"{case.name if case else 'whole'}{' (sealed)' if case and case.sealed else ''}:"
                f" {outcome}"
            )
        shutil.rmtree(place)
    return problems


def _set_up(place: pathlib.Path) -> None:
    """A folder to run in, with forbidden files next to the damaged ones, and code that must not be
    run."""
    (place / damage.OUTSIDE).mkdir(parents=True)
    for name in ("secret.json", "secret.safetensors"):
        (place / damage.OUTSIDE / name).write_text('{"secret": 1}')
    (place / "payload.py").write_text(PAYLOAD)
    (place / "configs").symlink_to(ROOT / "configs")


@pytest.mark.parametrize("name", [attack.name for attack in NAMED.values() if attack.short])
def test_some_damages(name, zygote, whole, tmp_path):
    attack = NAMED[name]
    problems = attack_with(
        attack,
        damage.some(whole(attack.make), attack.short, name, named=attack.named),
        zygote,
        whole,
        tmp_path,
    )
    assert not problems, "\n\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_long_form(name, zygote, whole, tmp_path):
    attack = NAMED[name]
    cases = [None, *damage.cases(whole(attack.make), most=attack.most, named=attack.named)]
    problems = attack_with(attack, cases, zygote, whole, tmp_path)
    assert not problems, f"{len(problems)} of {len(cases)} cases:\n" + "\n\n".join(problems[:20])
