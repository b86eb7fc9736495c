"""Labels that say that nothing was heard, that it is in doubt which class it is, or not one class.

Words are compared without case, accents and marks, in the languages of `answer_words`.
"""

import functools
import re

from loaders.audio.recordings import answer_words, column_names

# Labels, without case and marks, that say that nothing was heard, and that it is not known who was.
NO_CALL = set(
    "none nocall nocalls nocalling noid nobird nobirds nobat nobats noanimal noanimals nospecies"
    " noevent noevents nolabel nosound nothing noisefree novocalization novocalisation keinvogel"
    " keinruf keineart aucun ninguno nichts rien nada".split()
)
UNKNOWN = set(
    "unknown unk unid unidentified undetermined unidentifiable unknownbird unknownbat"
    " unknownspecies unknowncall unbekannt inconnu inconnue desconocido desconocida indet".split()
)
OPEN_NAMES = {"passer"}  # of a genus, and an answer that is none in a column of answers
# First words of a label that denies those behind them.
NEGATIONS = set(
    "no not non never without kein keine keinen nicht ohne pas aucun aucune sans sin ningun ninguna"
    " nao sem nenhum nenhuma nessun nessuna nessuno senza geen niet zonder".split()
)
# Words that may be denied together, so that the label says that nothing was heard.
ANYTHING = set(
    "a an any of d de call calls calling bird birds bat bats animal animals species event events"
    " sound sounds song songs vocal vocals vocalization vocalizations vocalisation vocalisations"
    " detection detections detected signal signals activity target targets present heard audible"
    " id label labels vogel vogels vogelruf ruf rufe art arten tier tiere oiseau oiseaux chant cri"
    " espece ave aves pajaro canto especie especies passaro uccello uccelli geluid soort"
    " soorten".split()
)
# First or last words of a label that deny the others, and marks.
ABSENT = set("absent absence abwesend ausente assente afwezig fp negative neg".split())
DENIED = re.compile(
    r"\s*[-!\u00ac]\s*[^\W\d_].*|.*\w\s*[:=]\s*(no|0|false|absent)\s*|.*[\s_(]not?[\s)]*"
    r"|.*\w[\s_(]+not[\s_]+(present|there|heard|seen|detected|found)[\s)]*",
    re.IGNORECASE,
)
QUALIFIERS = {"cf", "aff"}  # in any place of a name: Troglodytes cf. troglodytes
EITHER = re.compile(r".*\S +(or|oder) +\S.*", re.IGNORECASE)
APPROXIMATELY = re.compile(r"\s*~\s*[^\W\d_].*")


@functools.lru_cache(1 << 12)
def says_none(label: str) -> bool:
    """Whether a label says that there is no call: nocall, NoID, No bird song, (none)."""
    if _letters(label) in NO_CALL:
        return True
    first, *others = column_names.words(label) or [""]
    is_negation = first in NEGATIONS and first != "non"  # bird and non-bird are two classes
    return is_negation and bool(others) and ANYTHING.issuperset(others)


@functools.lru_cache(1 << 12)
def says_unknown(label: str) -> bool:
    """Whether a label leaves open what called: unknown, ????, wren?, TBD, cf. wren."""
    letters = _letters(label)
    if letters in UNKNOWN:
        return True
    if answer_words.is_open(label):
        return letters not in OPEN_NAMES
    if "?" in label or EITHER.fullmatch(label) or APPROXIMATELY.fullmatch(label):
        return True
    words = column_names.words(label)
    if len(words) < 2:
        return False
    ends = {words[0], words[-1], "".join(words[:2])}
    return not ends.isdisjoint(answer_words.IN_DOUBT | UNKNOWN) or not QUALIFIERS.isdisjoint(words)


@functools.lru_cache(1 << 12)
def denies(label: str) -> bool:
    """Whether a label says what was not heard: no wren, not_wren, wren absent, -wren."""
    if says_none(label):
        return False
    if DENIED.fullmatch(label):
        return True
    words = column_names.words(label)
    if len(words) < 2:
        return False
    if words[-1] in ABSENT or words[0] in ABSENT:
        return True
    if words[0] == "pas":  # else an abbreviated Passer
        return words[1] in ("de", "d", "un", "une", "le", "la")
    name = "".join(words[1:])  # not of NoCa, a code, or No. 1
    return words[0] in NEGATIONS and len(name) > 2 and not name.isdecimal()


def _letters(label: str) -> str:
    return re.sub(r"[\W_]+", "", label.casefold())
