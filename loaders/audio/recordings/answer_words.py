"""Words of answers about labels, in the languages of `column_names`: yes, no, and none yet.

Answers that are none are compared without case, accents and marks: "Not_validated" and "(not
validated)" are one. `OPEN` is written so.
"""

import functools
import re

from loaders.audio.recordings import column_names


def _split(words: str) -> set[str]:
    return set(words.split(", "))


YES = _split(
    "1, 1.0, true, t, yes, y, x, present, correct, positive, pos, wahr, vrai, verdadero, ja,"
    " oui, si, s\u00ed, s\u00ec, sim, vero, verdadeiro, waar, presente, aanwezig, vorhanden,"
    " pr\u00e9sent, \u2713, \u2714"
)
NO = _split(
    "0, 0.0, false, f, no, n, -, absent, not present, incorrect, negative, neg, falsch, faux,"
    " falso, nein, non, nee, n\u00e3o, onwaar, ausente, assente, afwezig, nicht vorhanden"
)
# Words of columns of answers alone.
CONFIRMED = _split(
    "confirmed, accepted, verified, approved, valid, validated, tp, true positive, ok, agree,"
    " agreed, richtig, korrekt, best\u00e4tigt, akzeptiert, g\u00fcltig, confirm\u00e9,"
    " accept\u00e9, valid\u00e9, correcto, confirmado, aceptado, correto, aceito, validado,"
    " corretto, confermato, validato, accettato, bevestigd, goedgekeurd, juist, gevalideerd"
)
# Of answers in a column of certainty, which others use for other things.
CERTAIN = _split("certain, sure, definite, sicher, seguro, certo, sicuro, zeker, s\u00fbr")
# Degrees of certainty, and the words for them in columns of it, without accents.
SURE, HIGH, MIDDLE, LOW = 3, 2, 0, -1
DEGREES = {
    **dict.fromkeys(
        _split(
            "certain, certainly, sure, definite, definitely, confident, sicher, eindeutig, sur,"
            " seguro, segura, certo, certa, sicuro, sicura, zeker"
        ),
        SURE,
    ),
    **dict.fromkeys(
        _split(
            "high, highest, hi, strong, good, full, complete, absolute, excellent, hoch, hohe,"
            " hoher, gross, haut, haute, eleve, elevee, fort, forte, bonne, alto, alta, buena,"
            " boa, buona, hoog, hoge, groot, goed"
        ),
        HIGH,
    ),
    **dict.fromkeys(
        _split(
            "medium, med, mid, middle, middling, moderate, average, fair, intermediate, mittel,"
            " mittlere, massig, moyen, moyenne, moderee, media, medio, moderado, moderada,"
            " moderata, gemiddeld, matig, half"
        ),
        MIDDLE,
    ),
    **dict.fromkeys(
        _split(
            "low, lowest, lo, weak, poor, bad, little, slight, zero, niedrig, gering, geringe,"
            " schwach, faible, basse, bas, mauvaise, bajo, baja, baixo, baixa, basso, bassa, mala,"
            " laag, lage, slecht"
        ),
        LOW,
    ),
}
# Words next to them: "very low", "high confidence".
OF_DEGREES = set(
    "very quite rather fairly extremely 100 sehr ganz ziemlich tres assez plutot muy bastante muito"
    " molto abbastanza erg zeer heel confidence certainty reliability probability id identification"
    " sicherheit wahrscheinlichkeit confiance certitude confianza certeza confianca fiducia"
    " certezza zekerheid level".split()
)
NEGATIONS = set("not no un non nicht kein keine pas peu poco pouco nao niet weinig".split())
NO_PERSON = set("nobody noone niemand personne nadie ninguem nessuno".split())
DENIED = _split(
    "rejected, denied, wrong, invalid, fp, false positive, discarded, deleted, disagree,"
    " disagreed, not ok, nok, not confirmed, abgelehnt, verworfen, ung\u00fcltig, nicht"
    " best\u00e4tigt, rejet\u00e9, refus\u00e9, incorrecto, rechazado, incorreto, rejeitado,"
    " rifiutato, scorretto, sbagliato, afgewezen, onjuist, fout"
)
# Words that leave the answer open.
_ENGLISH = (
    "skip, skipped, unknown, unk, not known, undefined, undetermined, not determined, undecided,"
    " pending, waiting, awaiting review, awaiting validation, in review, under review, in"
    " progress, wip, unvalidated, not validated, not yet validated, unverified, not verified, not"
    " yet verified, unchecked, not checked, not yet checked, unreviewed, not reviewed, not yet"
    " reviewed, unconfirmed, not yet confirmed, unanswered, not answered, no answer, unassessed,"
    " not assessed, not evaluated, unprocessed, not processed, not done, not yet done, not yet, to"
    " do, todo, to review, to be reviewed, to check, to be checked, to verify, to be verified, to"
    " validate, to be validated, to confirm, to be confirmed, to be determined, tbd, tbc, needs"
    " review, needs id, needs checking, needs validation, needs verification, requires review,"
    " uncertain, unsure, not sure, unclear, doubtful, questionable, ambiguous, inconclusive,"
    " indeterminate, may be, guess, don t know, dont know, can t tell, cannot tell, no data, not"
    " applicable, na, n a"
)
_GERMAN = (
    "unbekannt, nicht bekannt, ungepruft, nicht gepruft, noch nicht gepruft, zu prufen, noch zu"
    " prufen, prufen, unbestatigt, noch nicht bestatigt, unvalidiert, nicht validiert, noch nicht"
    " validiert, zu validieren, nicht verifiziert, unverifiziert, unbearbeitet, nicht bearbeitet,"
    " in bearbeitung, in arbeit, ausstehend, offen, noch offen, steht aus, unsicher, nicht sicher,"
    " unklar, fraglich, zweifelhaft, unbestimmt, nicht bestimmt, unentschieden, ubersprungen,"
    " uberspringen, weiss nicht, keine angabe, k a, nicht beurteilt, nicht bewertet, nicht"
    " beantwortet, zu erledigen"
)
_FRENCH = (
    "inconnu, inconnue, incertain, incertaine, pas sur, pas certain, non verifie, non verifiee,"
    " pas verifie, pas encore verifie, a verifier, non valide, non validee, pas valide, pas encore"
    " valide, a valider, non confirme, pas encore confirme, a confirmer, non revu, a revoir, non"
    " controle, a controler, non examine, a examiner, non traite, a traiter, a faire, en attente,"
    " en cours, douteux, doute, indetermine, indeterminee, non determine, ne sais pas, je ne sais"
    " pas, non renseigne, passe, passer, ambigu"
)
_SPANISH = (
    "desconocido, desconocida, no verificado, no verificada, sin verificar, por verificar, no"
    " validado, no validada, sin validar, por validar, no revisado, no revisada, sin revisar, por"
    " revisar, no confirmado, sin confirmar, por confirmar, pendiente, en espera, en proceso, en"
    " revision, dudoso, dudosa, duda, incierto, incierta, inseguro, no seguro, no se,"
    " indeterminado, indeterminada, sin determinar, por hacer, omitido, omitir, sin datos, no"
    " aplica, sin respuesta, ambiguo"
)
_PORTUGUESE = (
    "desconhecido, desconhecida, nao verificado, nao verificada, por verificar, a verificar, nao"
    " validado, nao validada, por validar, a validar, nao revisado, nao revisto, por rever, a"
    " rever, nao confirmado, por confirmar, a confirmar, pendente, em espera, em andamento, em"
    " analise, em revisao, duvidoso, duvidosa, duvida, incerto, incerta, nao sei, indeterminado,"
    " indeterminada, por fazer, a fazer, pular, ignorado, sem dados, sem resposta"
)
_ITALIAN = (
    "sconosciuto, sconosciuta, ignoto, non verificato, non verificata, da verificare, non"
    " validato, non validata, da validare, non controllato, da controllare, non rivisto, non"
    " revisionato, da rivedere, da revisionare, non confermato, da confermare, in attesa, in"
    " sospeso, in corso, da fare, dubbio, dubbia, incerto, incerta, non sicuro, non so,"
    " indeterminato, indeterminata, non determinato, saltato, salta, nessun dato, ambiguo"
)
_DUTCH = (
    "onbekend, ongecontroleerd, niet gecontroleerd, nog niet gecontroleerd, te controleren, nog"
    " te controleren, niet gevalideerd, nog niet gevalideerd, te valideren, niet bevestigd, nog"
    " niet bevestigd, te bevestigen, niet beoordeeld, nog niet beoordeeld, te beoordelen, niet"
    " bekeken, in behandeling, openstaand, in afwachting, te doen, nog te doen, onzeker, niet"
    " zeker, onduidelijk, twijfel, twijfelachtig, onbepaald, niet bepaald, weet niet,"
    " overgeslagen, overslaan, geen gegevens, niet ingevuld"
)
# And those that are in doubt, also as the first or last word of a label: maybe wren.
IN_DOUBT = set(
    "possible possibly poss probable probably prob maybe perhaps likely unlikely presumed"
    " presumably putative suspected supposed tentative tentatively uncertain unsure doubtful"
    " questionable unconfirmed unverified unvalidated unclear ambiguous moglich moglicherweise"
    " vermutlich wahrscheinlich vielleicht eventuell evtl unsicher unbestatigt fraglich"
    " possiblement probablement peutetre incertain douteux posible posiblemente probablemente"
    " quizas quiza talvez dudoso incierto possivel possivelmente provavel provavelmente duvidoso"
    " incerto possibile possibilmente forse probabile probabilmente dubbio mogelijk misschien"
    " waarschijnlijk onzeker twijfelachtig".split()
)
OPEN = IN_DOUBT.union(
    *map(_split, (_ENGLISH, _GERMAN, _FRENCH, _SPANISH, _PORTUGUESE, _ITALIAN, _DUTCH))
)
JUDGEMENTS = CONFIRMED | DENIED
# Words that together say the same: "noch nicht überprüft", "sin revisar todavía".
NOT_YET = set(
    "not no to needs need awaiting waiting requires in nicht noch zu non pas a attente sin por"
    " pendiente falta nao ainda da attesa niet nog te".split()
)
BETWEEN = set(
    "be been has have yet still for muss werden ist wird wurde encore en de est ete aun todavia"
    " ancora di moet worden is".split()
)
CHECKED = re.compile(
    "validat|validad|validier|valide$|gevalid|verif|checked|check$|review|revis|rever$|revu$|revoir"
    "|rived|uberpruf|gepruf|pruf|kontroll|control|gecontr|assess|beurteil|beoorde|bewert|annot"
    "|examin|inspect|label|bearbeit|process|bekeken|classif|identif"
)
QUESTION = re.compile(r"[^?]*\?+[\s)\]]*")  # "?", "yes?"
DASHES = re.compile(r"[\s(\[]*(-{3,}|\u2026|\.{3,})[\s)\]]*")


def is_open(text: str) -> bool:
    """Return whether a cell is an answer that is none: pending, unsure, yes?, not validated."""
    return bool(QUESTION.fullmatch(text)) or says_open(text)


@functools.lru_cache(1 << 12)
def says_open(text: str) -> bool:
    """Return whether a cell says so by more than a question mark."""
    if DASHES.fullmatch(text):
        return True
    words = column_names.words(text)
    if " ".join(words) in OPEN:
        return True
    checks = [word for word in words if CHECKED.match(word)]
    others = set(words).difference(checks, BETWEEN)
    return bool(checks) and bool(others) and others <= NOT_YET


@functools.lru_cache(1 << 12)
def degree(text: str) -> int | None:
    """Return the degree of certainty that a cell states in words, below `HIGH` if not for sure.

    Of several, as in "low to medium", the lowest. None: it states none.
    """
    words = [word for word in column_names.words(text) if word not in OF_DEGREES]
    negated = not NEGATIONS.isdisjoint(words)
    degrees = [DEGREES.get(word) for word in words if word not in NEGATIONS and word != "to"]
    stated = [each for each in degrees if each is not None]
    if not stated or len(stated) < len(degrees):
        return None
    lowest = min(stated)
    if negated:
        return MIDDLE
    return lowest
