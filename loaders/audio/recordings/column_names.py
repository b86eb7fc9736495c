"""The meaning of a table's columns by their names, in one table, `NAMES`, for all commands.

Names are compared without case, accents, blanks, points, underscores and brackets: "Begin Time
(s)", `begin_time_s` and R's `Begin.Time..s.` are one name. A unit at the end scales the values: s,
ms, min and h, Hz and kHz.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import NamedTuple


def _split_names(names: str) -> tuple[str, ...]:
    return tuple(names.split(", "))


# Meaning -> names. Of several columns with one meaning, the one whose name is listed first is used.
NAMES: Mapping[str, tuple[str, ...]] = {
    "file": _split_names(
        "begin path, file path, audio file path, audio path, begin file, in file, file name,"
        " file, audio file name, audio file, audio, path, recording, recording name,"
        " recording file, fname, sound files, sound file, wav file name, wav file, wav,"
        " slice file name, segment id, ytid, item id, item name, clip name, clip, source file,"
        " soundscape, sample name, media, datei, dateiname, archivo, nombre archivo,"
        " nombre del archivo, nombre de archivo, fichier, nom fichier, nom du fichier, aufnahme,"
        " enregistrement, grabacion, bestand, bestandsnaam, arquivo, ficheiro, sound url,"
        " ml catalog number"
    ),
    # and names with a word of `FOLDERS`
    "folder": _split_names("indir, in dir, folder, directory, dir, subfolder"),
    "start": _split_names(
        "start, start time, begin, begin time, onset, onset time, event start, event start time,"
        " segment start, event onset, window start, window start time, time begin, clip start,"
        " clip start time, start offset, time start, t start, t min, min t, time min, t0, x1,"
        " from, starts, beginn, tag start, anfang, startzeit, anfangszeit, von, inicio,"
        " tiempo inicio, debut, temps debut, tiempo inicial, inizio, file begin"
    ),
    "end": _split_names(
        "end, end time, stop, stop time, event end, event end time, segment end, event offset,"
        " window end, window end time, clip end, clip end time, end offset, time end, t end,"
        " t stop, t max, max t, time max, t1, x2, to, ends, finish, ende, endzeit, bis, fin,"
        " tiempo fin, temps fin, tiempo final, fim, file end"
    ),
    "duration": _split_names(
        "duration, dur, delta time, event duration, segment duration, tag duration, length,"
        " dauer, duree, duracion"
    ),
    # an end next to an onset, a start next to a duration
    "offset": _split_names("offset"),
    # Raven's start in the file; its Begin Time counts over all files
    "file offset": _split_names("file offset, begin file offset"),
    "label": _split_names(
        "manual id, label, labels, annotation, annotations, class name, class label, species,"
        " species name, ebird code, species ebird code, primary label, species code, alpha code,"
        " common name, scientific name, event label, positive labels, category, class, tags, tag,"
        " taxon, taxon name, vernacular name, english name, sci name, latin name, target, auto id,"
        " top1match, art, artname, spezies, especie, espece, class species"
    ),
    # with "epithet" or species a scientific name
    "genus": _split_names("gen, genus, gattung, genre, genero"),
    "epithet": _split_names("sp, specific epithet"),
    "low": _split_names(
        "low, low freq, low f, freq low, f low, f min, min freq, freq min, low frequency,"
        " min frequency, lower frequency, frequency min, frequency low, bottom freq, y1,"
        " start frequency, start freq, frequency start, freq start"
    ),
    "high": _split_names(
        "high, high freq, high f, freq high, f high, f max, max freq, freq max, high frequency,"
        " max frequency, upper frequency, frequency max, frequency high, top freq, y2,"
        " end frequency, end freq, frequency end, freq end"
    ),
    "channel": _split_names(
        "channel, channel number, channel no, channel index, chan, ch, kanal, canal, canale, voie"
    ),
    "selection": _split_names("selection, selec"),
    # whether a line of APLOSE is about a box, and not about its whole file
    "box": _split_names("is box"),
    "view": _split_names("view"),
    "answer": _split_names("answer, validated, validation, validation status"),
    "asked": _split_names("asked"),
    "score": _split_names("score, confidence"),
    "clock": _split_names("clock"),
    "embeddings": _split_names("embeddings"),
    # Those other than the first are used if all their values are names of splits. Columns without a
    # meaning are used if one of them is train, too.
    "split": _split_names("split, set, subset, partition, data split, dataset split, split name"),
    "recording": _split_names("recording id"),
    "site": _split_names("site, location, station, site name, site id, locality, loc, deployment"),
    "date": _split_names("date, recording date, date recorded, event date, datum, fecha"),
    "time": _split_names("time, local time, recording time, time of day, uhrzeit, heure, hora"),
    "datetime": _split_names(
        "date time, recorded at, timestamp, recording date time, recording start"
    ),
    # times slower than life that a recording is
    "time expansion": _split_names(
        "te, te factor, time expansion, time expansion factor, time exp, expansion factor"
    ),
    "latitude": _split_names("latitude, lat, decimal latitude, breitengrad, latitud"),
    "longitude": _split_names(
        "longitude, lon, lng, long, decimal longitude, laengengrad, langengrad, longitud"
    ),
}
# Columns of the same programs that say nothing about times and labels.
OTHER = _split_names(
    "notes, note, comment, comments, remarks, rmk, observer, recordist, rec, author, reviewer,"
    " annotator, url, license, lic, rating, quality, q, id, index, unnamed, row, x, key, uuid,"
    " model, overlap, sensitivity, week, min conf, species list, seconds, windows,"
    " unreadable windows, detections, query, begin clock time, end clock time, begin date,"
    " begin date time, begin hour, sample rate, rate, samplerate, peak time, center time,"
    " delta freq, peak freq, center freq, avg power density, inband power, occupancy, type, sex,"
    " stage, method, cnt, country, elevation, alt, uploaded, also, sono, osci, ssp, group, grp,"
    " en, manufacturer, device, recorder, temperature, temp, battery, gain, humidity, weather,"
    " hour, day, month, year, fs id, salience, fold, class id, esc10, src file, take, mids,"
    " out file, out dir, out file fs, out file zc, time 12, date 12, hour 12, n, verified,"
    " checked, file size, size, channels, fmean, fc, dur mean, match, matching, margin, pulses,"
    " qual, sc, tk, files, top1dist, s1"
)
# Of those, the ones that count, number or ask, and so are no class although they hold 0 and 1.
NUMBERS = set(
    "id index unnamed row key overlap sensitivity week minconf windows detections unreadablewindows"
    " hour day month year fold verified checked channels classid fsid esc10 uploaded rating size"
    " filesize".split()
)
# Columns that may say that a label was denied, or that nobody has checked it yet.
DOUBTFUL = set(
    "verifiziert gepruft verifie valide verificado validado verified verification"
    " verificationstatus status reviewstatus confirmed valid isvalid correct iscorrect checked"
    " reviewed accepted approved confirmation review truepositive tp validationresult"
    " manualvalidation labeltype present presence detected occurrencestatus keep use include"
    " included rejected falsepositive fp negative isnegative deleted exclude excluded ignore"
    " ignored discard discarded delete remove removed reject verdict outcome decision agree"
    " agreement korrekt richtig bestatigt gepruft verifiziert validiert confirme verifie correcto"
    " confirmado verificado manualcheck check modelpresence thresholdpresence presenceabsence"
    " presenceorabsence istp istruepositive isfp isfalsepositive".split()
)
# Words of names of columns that say how certain a label is, and how uncertain.
CERTAINTY = set(
    "certain certainty sure surety sicher sicherheit certitude certeza certezza zekerheid".split()
)
DOUBT = set(
    "uncertain uncertainty unsure doubt doubts doubtful unsicher unsicherheit zweifel zweifelhaft"
    " incertain incertitude doute douteux incierto incertidumbre incerto incerteza duda dudoso"
    " duvida duvidoso incertezza dubbio onzeker onzekerheid twijfel".split()
)
QUALIFIERS = set("qualifier identificationqualifier idqualifier taxonqualifier".split())  # cf.
QUALITIES = set("idquality identificationquality labelquality annotationquality".split())
# Words of names of columns of a detector's numbers, or of a person's words.
CONFIDENCE = set(
    "confidence confident reliability probability likelihood score vertrauen konfidenz"
    " verlasslichkeit wahrscheinlichkeit confiance fiabilite probabilite confianza fiabilidad"
    " probabilidad confianca probabilidade fiducia affidabilita probabilita betrouwbaarheid".split()
)
# Columns of the people who checked labels, and words of names of such columns and of their days.
CHECKERS = set(
    "reviewer reviewers verifier verificator validator checker confirmer approver prufer"
    " verificateur validateur revisor revisora verificador verificadora validador validadora"
    " revisore verificatore validatore".split()
)
CHECK = re.compile(
    "valid|verif|check(ed)?$|review|revis|revu$|confirm|approv|approuv|aprob|aprov|accepted$"
    "|(ge|uber|ueber)?pru?e?f|bestae?tig|kontroll|gecontrol|gevalid|bevestig"
)
OF_CHECKS = set(
    "by von durch par por da door on at am le date time day datum tag zeitpunkt fecha data"
    " initials person who name".split()
)
# such a name's last word
VERDICTS = set("verified confirmed validated reviewed checked approved accepted rejected".split())
DENYING = set(
    "rejected falsepositive fp isfp isfalsepositive negative isnegative deleted exclude excluded"
    " ignore ignored discard discarded delete remove removed reject".split()
)
# Columns of numbers of which 0 says that the label is absent: counts of animals and calls, and
# weights in [0, 1]. The confidence of a detector is none: it lists what it found at a threshold of
# 0, too.
COUNTS = set(
    "count counts individualcount individuals numberofindividuals nindividuals abundance ncalls"
    " ncall numcalls calls callcount numberofcalls anzahl individuen nombre effectif"
    " cantidad".split()
)
WEIGHTS = set("softlabel softlabels weight value relevance presenceprobability".split())
ABOUT = ("recording", "site", "latitude", "longitude")
SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds", "ss", "hhmmss"), 1.0),
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "usec", "\u03bcs", "microsecond", "microseconds"), 1e-6),
    "mmss": 1.0,
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
}
HERTZ = {"hz": 1.0, "khz": 1e3}
KILOHERTZ = ("bottomfreq", "topfreq")  # of warbleR, without a unit
# units that names have without a mark before them: startms
GLUED = ("milliseconds", "seconds", "msec", "secs", "sec", "ms")
# Words of units that are no times until they are divided by a rate, or multiplied by a length.
COUNTING = set("sample samples frame frames pixel pixels percent percentage fraction %".split())
# Words of names that say that a date is of a recording, not of an event in it.
RECORDING = set(
    "recording recorded rec file audio deployment deployed survey visit session upload uploaded"
    " created".split()
)
# Words in the name of a column that looks like a time, and like a label.
TIME = set(
    "start starts started begin begins onset end ends ended stop offset finish from to t t0 t1 t2"
    " time times timestamp sec secs second seconds s ms msec position at frame frames sample"
    " samples tstart tend interval window segment range span chunk slice pos timestamps onsets"
    " offsets when ende fin bis von sekunde sekunden seconde secondes segundo segundos intervall"
    " intervalle intervalo abschnitt fenster fenetre ventana segmento".split()
)
# How words begin and end that say so, too: Zeitpunkt, Startposition, detectionTime.
TIMES = re.compile(
    "start|begin|onset|offset|anfang|zeit|inici|inizi|debut|tiempo|temps|tempo|time|position"
    "|.*(time|zeit)$"
)
MINUTES = {"min", "minute", "minuten", "minutes", "minuto", "minutos"}  # such a word, too
SPLIT = {"train", "training", "test", "testing", "split", "holdout"}
# none, if a column of hours makes them a time of day
OF_DAY = MINUTES | {"sec", "second", "seconds"}
FOLDERS = set(
    "folder dir directory subfolder subdirectory ordner unterordner verzeichnis dossier repertoire"
    " carpeta directorio pasta cartella mappe map katalog".split()
)
# the last word of a column that numbers or counts
NUMBERING = {"id", "ids", "number", "nr", "no", "count", "index"}
LABEL = set(
    "label labels species class taxon taxa name annotation tag category code bird call sound event"
    " common scientific".split()
)
# Columns of further labels of a line: xeno-canto's "also", and the species behind the first.
MORE_LABELS = {"also", "background", "backgroundspecies", "otherspecies", "secondary"}
# Words of columns of frequencies, which are no times although they may have a start.
FREQUENCY = {"frequency", "frequencies", "freq", "freqs", "hz", "khz"}
BOXES = {"weak", "box", "point"}  # in a column of APLOSE named type
CATALOGUE = "mlcatalognumber"  # the column of recordings of the Macaulay Library
_OF_APLOSE = set(
    "dataset analysis annotationid isupdateofid annotatorexpertise startdatetime enddatetime type"
    " confidenceindicatorlabel confidenceindicatorlevel createdatphase signalquality"
    " signalquantity signalisintensitytoolow signaldoesoverlapothersignals signalstartfrequency"
    " signalendfrequency signalrelativeminfrequencycount signalrelativemaxfrequencycount"
    " signalminfrequency signalmaxfrequency signalstepscount signalhasharmonics signaltrend"
    " signalsidebands signalsubharmonics signalfrequencyjumps signaldeterministicchaos".split()
)
# Columns of programs that say nothing of a line's times and labels, in tables that have another
# column of the same program: of the Macaulay Library and of APLOSE.
OF_PROGRAMS: Mapping[str, set[str]] = {
    CATALOGUE: set(
        "format caption year month day country countrystatecounty state county"
        " agesex behaviors playback captive collected specimenid homearchivecatalognumber"
        " microphone accessory partnerinstitution ebirdchecklistid airtempc watertempc medianotes"
        " observationdetails parentspecies taxoncategory taxonomicsort recordist2"
        " averagecommunityrating numberofratings assettags originalimageheight"
        " originalimagewidth".split()
    ),
    "isbox": _OF_APLOSE,
    "annotatorexpertise": _OF_APLOSE,
}
# Tables that give times in another recording than the one that they name.
ELSEWHERE = ("ytid", "slicefilename")


def words(name: str) -> list[str]:
    """Return the words of a column's name in lower case, without accents and marks between them."""
    text = unicodedata.normalize("NFKD", name).strip("\ufeff")
    text = "".join(letter for letter in text if not unicodedata.combining(letter))
    text = re.sub("(?i)k?hz", lambda unit: f" {unit[0].casefold()} ", text)  # one word: kHz
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).casefold())


def plain(name: str) -> str:
    return "".join(words(name))


class Meaning(NamedTuple):
    """The meaning of a column by its name."""

    name: str  # of `NAMES`
    rank: int  # place in `NAMES`: of several columns, the one of the lowest rank counts first
    scale: float  # of the values, to s and Hz


def _rank_names() -> dict[str, tuple[str, int]]:
    ranks = {}
    for meaning, names in NAMES.items():
        for rank, name in enumerate(names):
            ranks[plain(name)] = (meaning, rank)
    return ranks


KNOWN = _rank_names()  # plain name -> meaning and rank
IGNORED = set(map(plain, OTHER))


def is_other(name: str) -> bool:
    """Whether a column is known to say nothing about times and labels."""
    parts = words(name)
    if not parts or parts[0] == "unnamed" or "".join(parts) in IGNORED:
        return True
    has_unit = parts[-1] in SECONDS or parts[-1] in HERTZ
    return has_unit and "".join(parts[:-1]) in IGNORED


def may_deny(name: str) -> bool:
    """Whether a column's name says that its cells may deny labels."""
    return plain(name) in DOUBTFUL or bool(VERDICTS & set(words(name)[-1:]))


def is_absent(name: str, text: str) -> bool | None:
    """Whether the number in a column of counts or weights is 0, None if it is no such number."""
    if plain(name) not in COUNTS | WEIGHTS or not re.fullmatch(r"\d+([.,]\d+)?", text):
        return None
    return float(text.replace(",", ".")) == 0


def says_time(name: str) -> bool:
    """Whether a column's name says that it holds times."""
    name_words = words(name)
    if not FREQUENCY.isdisjoint(name_words):
        return False
    return any(word in TIME or TIMES.match(word) for word in name_words)


def is_of_program(name: str, columns: Iterable[str]) -> bool:
    """Whether a column is one of a program that another column is of, and says nothing here."""
    plain_name = plain(name)
    for column in columns:
        if plain_name in OF_PROGRAMS.get(plain(column), ()):
            return True
    return False


def counting(name: str) -> str:
    """Return the word of a name that counts times in samples, frames or percent, or ""."""
    for word in words(name):
        if word in COUNTING:
            return word
    return "%" if "%" in name else ""


def unit_of(name: str) -> float:
    """Return the scale of a column of times to s, by the unit at the end of its name."""
    if meaning := meaning_of(name):
        return meaning.scale
    last_word = "".join(words(name)[-1:])
    return SECONDS.get(last_word, 1.0)


def meaning_of(name: str) -> Meaning | None:
    """Return a column's meaning, or None."""
    parts = words(name)
    plain_name = "".join(parts)
    if plain_name in KNOWN:
        meaning, rank = KNOWN[plain_name]
        return Meaning(meaning, rank, scale=1e3 if plain_name in KILOHERTZ else 1.0)
    if plain_name in IGNORED:
        return None
    if FOLDERS & set(parts) and parts[-1] not in NUMBERING:
        return Meaning("folder", rank=len(NAMES["folder"]), scale=1.0)
    stem, unit = _split_unit(name)
    meaning, rank = KNOWN.get(stem, ("", 0))
    if unit in SECONDS:
        # "time (s)" is a place in a recording, "time" one in a day
        if meaning in ("time", "datetime"):
            return Meaning("start", len(NAMES["start"]), SECONDS[unit])
        if meaning in ("start", "end", "duration", "offset", "file offset"):
            return Meaning(meaning, rank, SECONDS[unit])
    if unit in HERTZ and meaning in ("low", "high"):
        return Meaning(meaning, rank, HERTZ[unit])
    return None


def _split_unit(name: str) -> tuple[str, str]:
    """Return a column's plain name without its last word, and that word, which may be a unit."""
    parts = words(name)
    if not parts:
        return "", ""
    unit = parts[-1]
    if parts[-2:-1] == ["in"]:  # "start in s"
        del parts[-2]
    if parts[-2:-1] == ["ss"] and re.fullmatch("ms|s+|f+|0+", unit):  # hh:mm:ss.ms
        del parts[-1]
    if parts[-3:] in (["hh", "mm", "ss"], ["h", "mm", "ss"]):
        return "".join(parts[:-3]), "hhmmss"
    if in_minutes(name):
        return "".join(parts[:-2]), "mmss"
    if len(parts) == 1:
        for glued_unit in GLUED:
            if unit.endswith(glued_unit):
                return unit.removesuffix(glued_unit), glued_unit
    return "".join(parts[:-1]), unit


def in_minutes(name: str) -> bool:
    """Whether a column's name says that its times are m:ss."""
    parts = words(name)
    if parts[-2:-1] == ["ss"]:
        del parts[-1]
    if parts[-2:] not in (["mm", "ss"], ["m", "ss"], ["min", "sec"]):
        return False
    return parts[-3:-2] not in (["hh"], ["h"])


def what(name: str) -> str:
    """Return the meaning of a column, or ""."""
    meaning = meaning_of(name)
    return meaning.name if meaning else ""
