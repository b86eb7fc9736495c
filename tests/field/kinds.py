"""Odd tables, sorted by the kind of error that they invite: values against names, times under other
names, text of other systems.

Each has the rows that a person reads in it, or words of the error that refuses it, as in
`tests.field.corpus`.
"""

from tests.field.corpus import KALEIDOSCOPE, RAVEN, TWO, Case

WHOLE = ("a.wav 0 30 robin", "b.wav 0 30 wren")


def _two(
    name: str, columns: str, first: str, second: str, rows: tuple[str, ...] = TWO, *options: str
) -> Case:
    """Two events: file, start, end and label, and then other columns."""
    lines = (f"file,start,end,label{columns}", f"a.wav,2,3,robin{first}", f"b.wav,4,5,wren{second}")
    return Case(name, "\n".join(lines) + "\n", rows, options)


def _wide(name: str, columns: str, rows: tuple[str, ...], *options: str) -> Case:
    """Two recordings with columns of 0 and 1. The second has the opposite values of the first."""
    n = columns.count(",") + 1
    cells = [",".join(str((i + line) % 2) for i in range(n)) for line in (1, 0)]
    return Case(name, f"file,{columns}\na.wav,{cells[0]}\nb.wav,{cells[1]}\n", rows, options)


def _part(
    name: str, column: str, first: str, second: str, rows: tuple[str, ...] = (), *options: str
) -> Case:
    """Two labelled lines with a column that may be a time."""
    lines = (f"file,{column},label", f"a.wav,{first},robin", f"b.wav,{second},wren")
    return Case(
        name,
        "\n".join(lines) + "\n",
        rows or (f"!'{column}' looks like times", "!--start-column"),
        options,
    )


def _text(
    name: str, encoding: str, first: str, second: str, rows: tuple[str, ...], *options: str
) -> Case:
    return Case(
        name, f"file,label\na.wav,{first}\nb.wav,{second}\n".encode(encoding), rows, options
    )


def _raven(name: str, columns: str, *lines: str, rows: tuple[str, ...] = TWO) -> Case:
    return Case(name, "\n".join([f"{RAVEN}\t{columns}", *lines]) + "\n", rows)


NAMES_AND_VALUES = (
    _wide("class-fin", "blue,fin", ("a.wav 0 30 blue", "b.wav 0 30 fin")),
    _wide("class-low", "robin,low", ("a.wav 0 30 robin", "b.wav 0 30 low")),
    _wide("class-view", "robin,view", ("a.wav 0 30 robin", "b.wav 0 30 view")),
    _wide("class-call", "song,call", ("a.wav 0 30 song", "b.wav 0 30 call")),
    _wide("class-n", "robin,n", ("!'n' holds 0 and 1", "!--label-column 'robin,n'")),
    _wide(
        "class-n-named", "robin,n", ("a.wav 0 30 robin", "b.wav 0 30 n"), "--label-column=robin,n"
    ),
    _wide("class-n-left-out", "robin,n", ("a.wav 0 30 robin", "b.wav"), "--label-column=robin"),
    _wide(
        "class-of-lines", "robin,wren,has_audio", ("!'has_audio' holds 0 and 1", "!--label-column")
    ),
    _wide("class-of-checks", "robin,wren,is_checked", ("!'is_checked' holds 0 and 1",)),
    _wide("classes-is", "is_robin,is_wren", ("a.wav 0 30 is_robin", "b.wav 0 30 is_wren")),
    _wide("class-long", "short,long", ("!'long' holds 0 and 1",)),
    _wide(
        "class-station",
        "robin,station",
        ("a.wav 0 30 robin", "b.wav 0 30 station"),
        "--label-column=robin,station",
    ),
    _wide("class-twice", "robin,wren,robin", ("!'robin' twice", "!--label-column 'robin,wren'")),
    _wide(
        "class-forms",
        "Wu\u0308rger,Parus  minor",
        ("a.wav 0 30 W\u00fcrger", "b.wav 0 30 Parus minor"),
    ),
    Case("sites-of-numbers", "file,site,label\na.wav,0,robin\nb.wav,1,wren\n", WHOLE),
    Case(
        "presences",
        "file,species,label\na.wav,robin,1\nb.wav,wren,0\n",
        ("!--label-column 'species' --answer-column 'label'",),
    ),
    Case(
        "presences-used",
        "file,species,label\na.wav,robin,1\nb.wav,wren,0\n",
        ("a.wav 0 30 robin", "b.wav"),
        ("--label-column=species", "--answer-column=label"),
    ),
    Case(
        "numbers-and-names",
        "file,target,english\na.wav,5,robin\nb.wav,6,wren\n",
        ("a.wav 0 30 5", "b.wav 0 30 6", "=unused-column 1"),
    ),
    Case("versions", "file,label\na.wav,1.0\nb.wav,1.1\n", ("a.wav 0 30 1.0", "b.wav 0 30 1.1")),
    _wide("class-type", "robin,type", ("!'type' holds 0 and 1",)),
    _wide("class-art", "robin,art", ("!'art' holds 0 and 1",)),
    Case(
        "class-alone",
        "file,low\na.wav,1\nb.wav,0\n",
        ("!'low' with 0 and 1 may be", "!--label-column"),
    ),
    Case(
        "classes-low-high", "file,low,high\na.wav,1,0\nb.wav,0,1\n", ("!--label-column 'low,high'",)
    ),
    Case("english-names", "file,en\na.wav,Blackbird\n", ("!'en' may be one",)),
    Case(
        "count-of-classes",
        "fname,min_t,max_t,species_number,subset,robin,wren\na,2,3,1,train,1,0\nb,4,5,2,test,1,1\n",
        ("train a.wav", "test b.wav"),
    ),
    Case(
        "frequencies",
        "file,start,end,low,high,robin\na.wav,2,3,0,4,1\nb.wav,4,5,1,6,1\n",
        ("a.wav 2 3 robin", "b.wav 4 5 robin"),
    ),
    Case(
        "few-shot-q",
        "Audiofilename,Starttime,Endtime,Q\na.wav,2,3,POS\nb.wav,4,5,UNK\n",
        ("a.wav 2 3 Q", "=unanswered 1"),
    ),
    _raven(
        "empty-annotation.txt",
        "Begin File\tAnnotation\tSpecies",
        "1\tS\t1\t2\t3\t1\t9\ta.wav\t\trobin",
        "2\tS\t1\t4\t5\t1\t9\tb.wav\t\twren",
    ),
    _raven(
        "half-annotation.txt",
        "Begin File\tAnnotation\tSpecies",
        "1\tS\t1\t2\t3\t1\t9\ta.wav\tfaint\trobin",
        "2\tS\t1\t4\t5\t1\t9\tb.wav\t\twren",
        rows=("!'Annotation' is blank in 1 lines", "!--label-column"),
    ),
    Case(
        "epithets",
        "file,Genus,Species\na.wav,Parus,major\nb.wav,Dendrocopos,major\n",
        ("a.wav 0 30 Parus major", "b.wav 0 30 Dendrocopos major"),
    ),
    Case(
        "epithets-and-names",
        "file,Genus,Species\na.wav,Parus,major\nb.wav,Dendrocopos,Dendrocopos major\n",
        ("a.wav 0 30 Parus major", "b.wav 0 30 Dendrocopos major"),
    ),
    Case(
        "epithets-in-capitals",
        "file,Genus,Species\na.wav,PARUS,MAJOR\nb.wav,DENDROCOPOS,MAJOR\n",
        ("!for PARUS and for",),
    ),
    Case(
        "calls-of-genera",
        "file,Genus,Species,label\na.wav,Parus,major,song\nb.wav,Parus,ater,call\n",
        ("a.wav 0 30 song", "b.wav 0 30 call", "=unused-column 2"),
    ),
    Case(
        "epithets-in-german",
        "Datei;Gattung;Art\na.wav;Parus;major\nb.wav;Dendrocopos;major\n",
        ("a.wav 0 30 Parus major", "b.wav 0 30 Dendrocopos major"),
    ),
    Case(
        "denials-in-german",
        "Datei;Art;Status\na.wav;robin;best\u00e4tigt\nb.wav;wren;abgelehnt\n",
        ("!'abgelehnt'",),
    ),
    Case(
        "answers-in-french",
        "fichier;esp\u00e8ce;valid\u00e9\na.wav;robin;oui\nb.wav;wren;non\n",
        ("!'valid\u00e9' holds",),
    ),
    Case("epithet-alone", "file,Genus,Species\na.wav,Parus,major\nb.wav,,major\n", ("!no genus",)),
    _two("split-set", ",set", ",Training", ",Testing", ("train a.wav", "test b.wav")),
    _two("split-other-set", ",set", ",A", ",B", (*TWO, "=unused-column 1")),
    Case(
        "split-as-classes",
        "file,robin,wren,train,test\na.wav,1,0,1,0\nb.wav,0,1,0,1\n",
        ("!'train' holds 0 and 1",),
    ),
    _two("split-blank", ",split", ",train", ",", ("!no-split",)),
    _two(
        "fold-names",
        ",fold",
        ",fold5",
        ",fold1",
        ("!no line has '5'", "!fold1, fold5"),
        "--split=column=fold:5",
    ),
    _two("verified", ",verified", ",yes", ",no", ("!'verified' holds 'no'", "!--answer-column")),
    _two(
        "verified-used",
        ",verified",
        ",yes",
        ",no",
        ("a.wav 2 3 robin", "b.wav 4 5"),
        "--answer-column=verified",
    ),
    _two("status", ",status", ",accepted", ",rejected", ("!'status' holds 'rejected'",)),
    _two("status-kept", ",status", ",accepted", ",rejected", TWO, "--answer-column=none"),
    _two("verdicts", ",outcome", ",TP", ",FP", ("!'outcome' holds 'FP'",)),
    _two(
        "verdicts-underlined",
        ",Verified",
        ",true_positive",
        ",false_positive",
        ("!'Verified' holds 'false_positive'",),
    ),
    _two("verdicts-german", ",Status", ",ok", ",abgelehnt", ("!'Status' holds 'abgelehnt'",)),
    _two(
        "verdicts-agreeing",
        ",REVIEW",
        ",agree",
        ",disagree",
        ("a.wav 2 3 robin", "b.wav 4 5"),
        "--answer-column=REVIEW",
    ),
    _two(
        "verdict-maybe",
        ",confirmed",
        ",yes",
        ",maybe",
        ("!'confirmed' holds 'maybe'", "!--answer-column none"),
    ),
    _two("verdict-number", ",correct", ",1", ",2", ("!'correct' holds '2'",)),
    _two("verdict-name", ",korrekt", ",ja", ",nein", ("!'korrekt' holds 'nein'",)),
    _two(
        "delete", ",delete", ",", ",x", ("a.wav 2 3 robin", "b.wav 4 5"), "--answer-column=delete"
    ),
    _two(
        "model-presences",
        ",model_presence",
        ",present",
        ",absent",
        ("!'model_presence' holds 'absent'", "!--answer-column"),
    ),
    _two(
        "presence-letters", ",presence", ",P", ",A", ("!'presence' holds 'A'", "!--answer-column")
    ),
    _two(
        "presence-letters-used",
        ",Presence/Absence",
        ",P",
        ",A",
        ("a.wav 2 3 robin", "b.wav 4 5"),
        "--answer-column=Presence/Absence",
    ),
    _two("is-tp", ",is_tp", ",1", ",0", ("!'is_tp' holds '0'",)),
    _two("status-letters", ",status", ",B", ",A", (*TWO,)),
    _two(
        "counts-of-0",
        ",individualCount",
        ",3",
        ",0",
        ("!'individualCount' holds '0' in 1 lines", "!--answer-column"),
    ),
    _two(
        "counts-of-0-used",
        ",n_calls",
        ",3",
        ",0",
        ("a.wav 2 3 robin", "b.wav 4 5"),
        "--answer-column=n_calls",
    ),
    _two("counts", ",Anzahl", ",3", ",1", (*TWO,)),
    _two("weights-of-0", ",soft_label", ",0.9", ",0.0", ("!'soft_label' holds '0.0'",)),
    _two(
        "weights-of-0-used",
        ",value",
        ",0.9",
        ",0.0",
        ("a.wav 2 3 robin", "b.wav 4 5"),
        "--answer-column=value",
    ),
    _two("weights-of-0-kept", ",soft_label", ",0.9", ",0.0", TWO, "--answer-column=none"),
    _two("weights-unset", ",soft_label", ",0", ",0", TWO),
    _two("scores-of-0", ",Confidence", ",0.9", ",0.0000", TWO),
    Case(
        "relevances",
        "sample_key,instrument,relevance\na,robin,0.9\nb,wren,0.0\n",
        ("!'relevance' holds '0.0'",),
        ("--file-column=sample_key", "--label-column=instrument"),
    ),
    Case("a.soft.txt", "0\t1\trobin\t0.9\n0\t1\twren\t0.0\n", ("!has the weight 0",)),
    _two("status-of-species", ",status", ",LC", ",EN", (*TWO, "=unused-column 1")),
    _two(
        "absences",
        ",occurrenceStatus",
        ",present",
        ",absent",
        ("!'occurrenceStatus' holds 'absent'",),
    ),
    _two(
        "split-not-asked-for",
        ",split",
        ",train",
        ",",
        (*TWO, "=unused-column 1"),
        "--split=recording=0.001",
    ),
    Case(
        "arbimon-presences",
        "recording,site,year,month,day,hour,min,robin<Song>,wren<Call>\n"
        "a.wav,S,2024,5,23,5,30,1,---\n"
        "b.wav,S,2024,5,23,6,0,0,1\n",
        ("b.wav 0 30 wren<Call>", "=open-class 1"),
    ),
    Case(
        "kaleidoscope-bats",
        f"{KALEIDOSCOPE},Dur,Fc\n/x,A,x.wav,0,2,1,1,2,EPTFUS,,3.1,25\n",
        ("A/x.wav 2 3 EPTFUS",),
    ),
    Case(
        "duration-other",
        "file,start,end,duration,label\na.wav,2,3,1,robin\nb.wav,4,5,9,wren\n",
        (*TWO, "=other-duration 1"),
    ),
    Case(
        "duration-rounded",
        "file,start,end,duration (ms),label\na.wav,2.04,3,1000,robin\nb.wav,4,5,1000,wren\n",
        ("a.wav 2.04 3 robin", "b.wav 4 5 wren", "=other-duration 0"),
    ),
    Case(
        "duration-of-files",
        "file,start,end,duration,label\na.wav,2,3,30.0,robin\nb.wav,4,5,29.998,wren\n",
        (*TWO, "=other-duration 0"),
    ),
    Case(
        "band-exchanged",
        "file,start,end,fmin,fmax,label\na.wav,2,3,400,300,robin\nb.wav,4,5,300,400,wren\n",
        (*TWO, "=odd-band 1"),
    ),
    Case(
        "band-below-0",
        "file,start,end,fmin,fmax,label\na.wav,2,3,-1,400,robin\nb.wav,4,5,0,400,wren\n",
        (*TWO, "=odd-band 1"),
    ),
    Case(
        "duration-option-next-to-ends",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5,wren\n",
        (*TWO, "=other-duration 2"),
        ("--duration-column=5s",),
    ),
    Case(
        "time-expansion-x",
        "file,start,end,label,TE\na.wav,2,3,robin,x10\nb.wav,4,5,wren,10x\n",
        (*TWO, "=time-expansion 2"),
    ),
    Case(
        "band-falls",
        "file,start,end,start_frequency,end_frequency,label\na.wav,2,3,400,300,robin\n"
        "b.wav,4,5,300,400,wren\n",
        (*TWO, "=odd-band 0"),
    ),
    Case(
        "certainty",
        "file,start,end,label,certainty\na.wav,2,3,robin,certain\nb.wav,4,5,wren,uncertain\n",
        ("!'certainty' holds 'uncertain' in 1 lines, whose labels are uncertain",),
    ),
    Case(
        "certainty-answered",
        "file,start,end,label,certainty\na.wav,2,3,robin,certain\nb.wav,4,5,wren,uncertain\n",
        ("a.wav 2 3 robin", "=unanswered 1"),
        ("--answer-column=certainty",),
    ),
    Case(
        "labels-open",
        "file,start,end,label\na.wav,1,2,Passer\na.wav,2,3,wren?\nb.wav,4,5,TBD\n",
        ("a.wav 1 2 Passer", "a.wav 2 3 wren?", "b.wav 4 5 TBD", "=open-label 2"),
    ),
    _two(
        "certainty-in-words",
        ",confidence",
        ",high",
        ",low",
        ("!'confidence' holds 'low' in 1 lines, whose labels are uncertain",),
    ),
    _two(
        "certainty-in-words-answered",
        ",confidence",
        ",high",
        ",low",
        (TWO[0], "=unanswered 1"),
        "--answer-column=confidence",
    ),
    _two("certainty-in-numbers", ",certainty", ",3", ",1", (*TWO, "=unused-column 1")),
    _two("doubt", ",uncertain", ",no", ",x", ("!'uncertain' holds 'x' in 1 lines, whose",)),
    _two(
        "checked-by-nobody",
        ",verified by",
        ",Anna",
        ",",
        ("!'verified by' holds '' in 1 lines, whose labels are denied or not checked yet",),
    ),
    _two(
        "checked-by-nobody-answered",
        ",verified by",
        ",Anna",
        ",",
        (TWO[0], "=unanswered 1"),
        "--answer-column=verified by",
    ),
    _two("checked-by-somebody", ",verified by", ",Anna", ",Ben", (*TWO, "=unanswered 0")),
    Case(
        "labels-denied",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5,no wren\n",
        ("!1 error", "!denied-label: 1 (refused)", "!nocall"),
    ),
    Case(
        "labels-denied-kept",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5,no wren\n",
        ("a.wav 2 3 robin", "b.wav 4 5 no wren", "=denied-label 1"),
        ("--on", "denied-label=keep"),
    ),
    Case(
        "labels-denied-dropped",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5,no wren\n",
        (TWO[0], "=denied-label 1"),
        ("--on", "denied-label=drop"),
    ),
    Case(
        "labels-qualified",
        "file,start,end,label\na.wav,2,3,cf. wren\nb.wav,4,5,robin or wren\n",
        ("a.wav 2 3 cf. wren", "b.wav 4 5 robin or wren", "=open-label 2"),
    ),
    Case(
        "answers-counted",
        "file,start,end,label,status\n"
        + "".join(
            f"a.wav,{n},{n + 1},robin,{status}\n"
            for n, status in enumerate("pending rejected pending ok unsure pending".split())
        ),
        ("!'status' holds 'pending' in 3, 'rejected' in 1, 'unsure' in 1 lines, whose labels",),
    ),
    Case("column-without-letters", "file,%,robin\na.wav,7,1\n", ("a.wav 0 30 robin",)),
    Case(
        "spanish-booleans",
        "archivo;robin;wren\na.wav;VERDADERO;FALSO\nb.wav;FALSO;VERDADERO\n",
        WHOLE,
    ),
    Case("german-answers", "datei;robin;wren\na.wav;ja;nein\nb.wav;nein;ja\n", WHOLE),
    _two(
        "false-positives", ",FP", ",0", ",1", ("a.wav 2 3 robin", "b.wav 4 5"), "--answer-column=FP"
    ),
)

SPLITS_AND_DATES = (
    _two("checks", ",check", ",valid", ",valid", (*TWO, "=unused-column 1")),
    _two("purposes", ",purpose", ",train", ",test", ("train a.wav", "test b.wav")),
    _two("tests-alone", ",split", ",test", ",test", ("test a.wav", "test b.wav")),
    _two("short-splits", ",split", ",tr", ",te", ("train a.wav", "test b.wav")),
    _two(
        "splits-and-more",
        ",subset",
        ",train_curated",
        ",test",
        ("!holds splits, and 'train_curated'", "!--split-column"),
    ),
    _two("is-test", ",is_test", ",0", ",1", ("!--split column=is_test:1",)),
    _two(
        "is-test-asked-for",
        ",is_test",
        ",0",
        ",1",
        ("train a.wav", "test b.wav"),
        "--split=column=is_test:1",
    ),
    _two("is-training", ",training", ",TRUE", ",FALSE", ("!--split column=training:FALSE",)),
    _two(
        "other-dates",
        ",date,Recorded on",
        ",2020-01-01,2024-05-23",
        ",2020-01-01,2024-04-01",
        (*TWO, "=unused-column 1"),
    ),
    _two(
        "dots-months-first",
        ",date",
        ",01.06.2024",
        ",02.03.2024",
        ("train a.wav", "train b.wav"),
        "--dates=month-first",
        "--split=date=2024-05-01",
    ),
    _two(
        "dots-days-first",
        ",date",
        ",01.06.2024",
        ",02.03.2024",
        ("test a.wav", "train b.wav"),
        "--split=date=2024-05-01",
    ),
    _two(
        "dates-of-another-column",
        ",date,recorded at",
        ",06/07/2024,04/13/2024",
        ",01/04/2024,04/14/2024",
        ("!in 'date', '06/07/2024'", "!--dates"),
    ),
)
TONGUES = (
    ("Bestand", "Inizio", "Stop"),
    ("Arquivo", "In\u00edcio", "Fim"),
    ("Bestand", "Tiempo inicial (s)", "Tiempo final"),
    ("FileName", "FileBeginSec", "FileEndSec"),
)
JOINED = "Begin File\tBeg File Samp (samples)\tSpecies"
FILES = (
    *(
        Case(
            f"tongue-{n}", f"{','.join(names)},ClassSpecies\na.wav,2,3,robin\nb.wav,4,5,wren\n", TWO
        )
        for n, names in enumerate(TONGUES)
    ),
    Case(
        "addresses",
        "sound_url,species\nhttps://x.org/1/a.wav?159,robin\nhttps://x.org/2/b.wav?x=1#t,wren\n",
        WHOLE,
    ),
    _raven(
        "joined-files.txt",
        JOINED,
        "1\tS\t1\t2\t3\t1\t9\ta.wav\t16000\trobin",
        "2\tS\t1\t34\t35\t1\t9\tb.wav\t32000\twren",
        rows=("!counts over all files", "!File Offset (s)"),
    ),
    _raven(
        "own-files.txt",
        JOINED,
        "1\tS\t1\t2\t3\t1\t9\ta.wav\t16000\trobin",
        "2\tS\t1\t4\t5\t1\t9\tb.wav\t32001\twren",
    ),
    *(
        Case(
            f"folder-{n}", f"{name},file,label\nA,z.flac,robin\n", ("!missing-file", "!contradicts")
        )
        for n, name in enumerate(("Ordner", "dossier", "carpeta", "parent_folder", "folder_path"))
    ),
    Case("folder-and-path", "folder,file,label\nA,deep/z.flac,robin\n", ("!missing-file",)),
    Case(
        "folder-twice", "folder,file,label\nB,B/deep/z.flac,robin\n", ("B/deep/z.flac 0 30 robin",)
    ),
    Case(
        "path-of-folders",
        "path,filename,label\n/data/A,x.wav,robin\n/data/B,x.wav,wren\n",
        ("A/x.wav 0 30 robin", "B/x.wav 0 30 wren"),
    ),
    _raven(
        "file-path.txt",
        "File Path\tBegin File\tSpecies",
        "1\tS\t1\t2\t3\t1\t9\tD:\\r\\A\tx.wav\trobin",
        rows=("A/x.wav 2 3 robin",),
    ),
    Case(
        "other-folder", "file,label\nspring/a.wav,robin\n", ("a.wav 0 30 robin", "=other-folder 1")
    ),
    Case(
        "two-files",
        "file,audio_file,label\na.wav,b.wav,robin\n",
        ("!name different recordings", "!--file-column"),
    ),
    Case(
        "two-files-named",
        "file,audio_file,label\na.wav,b.wav,robin\n",
        ("b.wav 0 30 robin",),
        ("--file-column=audio_file",),
    ),
    Case(
        "clips-of-files",
        "source_file,clip,start,end,label\na.wav,b.wav,2,3,robin\n",
        ("!name different recordings",),
    ),
    Case("files-and-titles", "file,recording,label\na.wav,Dawn,robin\nb.wav,Dusk,wren\n", WHOLE),
    Case(
        "files-and-paths",
        "Begin Path,Begin File,label\nD:\\r\\a.wav,a.wav,robin\nD:\\r\\b.wav,b.wav,wren\n",
        WHOLE,
    ),
    Case("a.birds.csv", "wavname,start,end,label\na.wav,2,3,robin\nb.wav,4,5,wren\n", TWO),
)

TIMES = (
    *(
        Case(
            f"whole-of-{n}",
            f"{name},start,end,label\na.wav,2,3,robin\nb.wav,4,5,wren\n",
            TWO,
            ("--start-column=start", "--end-column=end"),
        )
        for n, name in enumerate(("YTID", "slice_file_name"))
    ),
    _part("seconds", "seconds", "2", "7"),
    _part("peak-time", "Peak Time (s)", "2.5", "7.5"),
    _part("minute", "minute", "0", "1"),
    _part("interval", "interval", "0-5", "5-10"),
    _part(
        "interval-named",
        "interval",
        "0-5",
        "5-10",
        ("a.wav 0 5 robin", "b.wav 5 10 wren"),
        "--start-column=interval",
    ),
    _part("window", "window", "0_5", "5_10"),
    _part("segment", "segment", "00:05-00:10", "00:10-00:15"),
    _part("time-ranges", "time", "0:05-0:10", "0:10-0:15"),
    _part("early-time", "time", "0:12", "0:15"),
    _part("times-with-days", "seg_from", "0 days 00:00:02", "0 days 00:00:07"),
    _part(
        "times-with-frames",
        "clip_in_time",
        "00:00:02:12",
        "00:00:07:00",
        ("!write seconds in place of '00:00:02:12'",),
    ),
    _part("times-of-noon", "time_in", "12:00:02 AM", "12:00:07 AM"),
    _part("about-times", "when", "2-3 sec", "ca. 4"),
    _part("compound-time", "Startposition", "2.5", "7.5"),
    _part("clock-dates", "event_start_utc", "2024-05-23T05:30:02Z", "2024-05-23T05:30:07Z"),
    _part("dates-of-1899", "start_pos", "1899-12-30 00:00:02", "1899-12-30 00:00:07"),
    _part("survey-dates", "Survey start", "2024-05-23 05:30:00", "2024-05-24 05:30:00", WHOLE),
    Case(
        "detection-times",
        "file,Detection Time,label\na.wav,2024-05-23 05:30:02,robin\na.wav,2024-05-23"
        " 05:30:07,robin\n",
        ("!'Detection Time' looks like times",),
    ),
    _part(
        "detection-times-unused",
        "event_start_utc",
        "2024-05-23T05:30:02Z",
        "2024-05-23T05:30:07Z",
        WHOLE,
        "--start-column=none",
    ),
    Case(
        "windows-of-5-s",
        "filename,timestamp_s,label\na.wav,0,robin\nb.wav,5,wren\n",
        ("!--duration-column 5s",),
    ),
    Case(
        "windows-of-5-s-said",
        "filename,timestamp_s,label\na.wav,0,robin\nb.wav,5,wren\n",
        ("a.wav 0 5 robin", "b.wav 5 10 wren"),
        ("--duration-column=5s",),
    ),
    Case(
        "ends-of-5-s-said",
        "audio,seconds,label\na.wav,5,robin\nb.wav,10,wren\n",
        ("a.wav 0 5 robin", "b.wav 5 10 wren"),
        ("--end-column=seconds", "--duration-column=5s"),
    ),
    Case(
        "ms-and-s",
        "file,start_ms,start_s,end_ms,end_s,label\na.wav,2000,2,3000,3,robin\n"
        "b.wav,4000,4,5000,5,wren\n",
        TWO,
    ),
    Case(
        "min-and-s",
        "file,start_min,start_s,end_s,label\na.wav,0,2,3,robin\n",
        ("!write their sum in s",),
    ),
    Case("rounded-start", "file,start,end,label\na.wav,-0.00001,3,robin\n", ("a.wav 0 3 robin",)),
    Case("number-of-pandas", "file,label\n77.0,robin\n", ("!names '77'",)),
    _part("time-of-day", "time", "5:30", "6:15", WHOLE),
    _part("time-of-day-digits", "time", "0530", "1615", WHOLE),
    _part("time-digits", "time", "530", "1615", ("!a time of day is written 05:30",)),
    _part("sections", "Abschnitt", "00:05-00:10", "00:10-00:15"),
    _part("seconds-in-spanish", "segundo", "1", "2"),
    _part("units", "at", "12s", "1m15s"),
    _part("ranges-in-brackets", "span", '"[0, 5]"', '"[5, 10]"'),
    _part("begin-hour", "begin hour", "5", "6", WHOLE),
    _part("time-with-its-date", "time", "2024-05-23 05:30", "2024-05-23 06:30", WHOLE),
    Case(
        "days-of-excel",
        "file,start,end,label\na.wav,0.0000231481,0.0000347222,robin\n",
        ("!a spreadsheet's part of a day",),
    ),
    Case(
        "days-of-excel-without-start",
        "file,end,label\na.wav,0.0000231481,robin\n",
        ("!'0.0000231481' as its 'end', a spreadsheet's part of a day",),
        ("--duration-column=5s",),
    ),
    Case(
        "about-recordings",
        "file,species,duration_s,sample_rate,hour,minute,second,sample_id\n"
        "a.wav,robin,30,48000,5,30,0,7\n"
        "b.wav,wren,29.5,48000,6,0,0,8\n",
        (*WHOLE, "=unused-column 2"),
    ),
    _part("midnight", "time", "00:00:00", "00:30:00", WHOLE),
    _part("row-id", "row_id", "a_5", "b_10"),
    Case(
        "two-durations",
        "file,duration,label\na.wav,2,robin\na.wav,3,robin\n",
        ("!'duration' looks like times",),
    ),
    Case(
        "minutes-said",
        "file,start (mm:ss),end (mm:ss),label\na.wav,0:02,0:03,robin\n",
        ("a.wav 2 3 robin",),
    ),
    Case(
        "french", "fichier;d\u00e9but;fin;esp\u00e8ce\na.wav;2,5;3;robin\n", ("a.wav 2.5 3 robin",)
    ),
    _raven(
        "no-offset.txt",
        "Begin File\tFile Offset (s)\tSpecies",
        "1\tS\t1\t2\t3\t1\t9\ta.wav\t2\trobin",
        "2\tS\t1\t34\t35\t1\t9\tb.wav\t\twren",
        rows=("!has no 'File Offset (s)'",),
    ),
    _raven(
        "views-without-bands.txt",
        "Begin File\tSpecies",
        "1\tWaveform 1\t1\t2\t3\t\t\ta.wav\trobin",
        "1\tSpectrogram 1\t1\t2\t3\t1\t9\ta.wav\trobin",
        "2\tWaveform 1\t1\t4\t5\t\t\tb.wav\twren",
    ),
    _two("channels", ",channel", ",1.0", ",L", TWO, "--channels=table"),
    _two(
        "channel-right",
        ",channel",
        ",1",
        ",right",
        ("!channel 2 of a recording with 1",),
        "--channels=table",
    ),
    _two("channel-odd", ",channel", ",1", ",top", (*TWO, "=odd-channel 1")),
    _two("decimal-places", ",lat", ',"51,1"', ",51.1N"),
    _two("odd-places", ",lat", ",99", ",here", (*TWO, "=odd-place 2")),
)

TEXTS = (
    Case(
        "lists",
        "file,label\na.wav,\"[Bewick's Wren, robin]\"\nb.wav,\"('robin', 'wren')\"\n",
        ("a.wav 0 30 Bewick's Wren|robin", "b.wav 0 30 robin|wren"),
    ),
    Case(
        "lists-in-words",
        "file,label\na.wav,\"array(['robin', 'wren'], dtype=object)\"\nb.wav,\"(robin, wren)\"\n",
        ("a.wav 0 30 robin|wren", "b.wav 0 30 robin|wren"),
    ),
    Case("types-with-numbers", "file,label\na.wav,song type 1.2\n", ("a.wav 0 30 song type 1.2",)),
    Case(
        "lists-of-r",
        "file,label\na.wav,\"{robin,wren}\"\nb.wav,\"c('robin', 'wren')\"\n",
        ("a.wav 0 30 robin|wren", "b.wav 0 30 robin|wren"),
    ),
    _part("slashes", "n", "1", "2", ("!split it with --separator ' / '",))._replace(
        content="file,label\na.wav,robin / wren\n"
    ),
    Case(
        "names-between", 'file,species\na.wav,"Turdus merula, Parus major"\n', ("!--separator ','",)
    ),
    Case(
        "codes-between",
        f'{KALEIDOSCOPE}\nD:\\rec,A,x.wav,0,2,1,1,2,x,"PIPPIP,NYCNOC"\n',
        ("!--separator ','",),
    ),
    Case(
        "codes-split",
        f'{KALEIDOSCOPE}\nD:\\rec,A,x.wav,0,2,1,1,2,x,"PIPPIP,NYCNOC"\n',
        ("A/x.wav 2 3 NYCNOC|PIPPIP",),
        ("--separator=,",),
    ),
    Case(
        "plural-name",
        'fname,labels,mids\na,"Electric_guitar,Guitar","/m/02sgy,/m/0342h"\n',
        ("!--separator ','",),
    ),
    Case("plural-tags", "file,tags\na.wav,bird nature forest\n", ("!--separator ' '",)),
    Case(
        "recurring-parts",
        'file,label\na.wav,"robin,wren"\nb.wav,"wren,crow"\n',
        ("!--separator ','",),
    ),
    Case(
        "inverted-names",
        'file,label\na.wav,"Bunting, Reed"\nb.wav,"Bunting, Corn"\n',
        ("a.wav 0 30 Bunting, Reed", "b.wav 0 30 Bunting, Corn"),
    ),
    Case(
        "colours-and",
        "file,label\na.wav,Blue and yellow macaw\nb.wav,Blue and gold macaw\n",
        ("a.wav 0 30 Blue and yellow macaw", "b.wav 0 30 Blue and gold macaw"),
    ),
    Case(
        "slash-beside-one", "file,label\na.wav,Amsel/Buchfink\nb.wav,Amsel\n", ("!--separator '/'",)
    ),
    Case(
        "codes-with-blanks",
        "filename,primary_label\na.wav,amerob houwre\nb.wav,amerob\n",
        ("!--separator ' '",),
    ),
    Case(
        "wide-marks",
        "file,label\na.wav,\u30a6\u30b0\u30a4\u30b9\u3001\u30e1\u30b8\u30ed\n",
        ("!--separator '\u3001'",),
    ),
    Case("tab-in-a-cell", "file,label\na.wav,robin\twren\n", ("!--separator '|'",)),
    _two("secondary-labels", ",secondary_labels", ",['wren']", ",[]", (*TWO, "=unused-column 1")),
    *(
        _two(f"more-in-{name}", f",{name}", ",crow;jay", ",", (*TWO, "=unused-column 1"))
        for name in ("label2", "species2", "background", "also")
    ),
    Case(
        "two-labels",
        "file,label1,label2\na.wav,robin,wren\nb.wav,wren,\n",
        ("a.wav 0 30 robin|wren", WHOLE[1]),
        ("--label-column=label1,label2",),
    ),
    _text(
        "turkish",
        "cp1254",
        "\u015fahin",
        "wren",
        ("a.wav 0 30 \u00feahin", WHOLE[1], "=other-encoding 1"),
    ),
    Case(
        "plus-between",
        "file,label\na.wav,robin + wren\nb.wav,robin\n",
        ("!split it with --separator ' + '",),
    ),
    Case(
        "blanks-between",
        "file,label\na.wav,robin wren\nb.wav,robin\nB/deep/z.flac,wren\n",
        ("!--separator ' '",),
    ),
    *(
        Case(
            f"none-{n}",
            f"file,label\na.wav,robin\nb.wav,{text}\n",
            (WHOLE[0], "b.wav", "=no-label 1"),
        )
        for n, text in enumerate(("nocall", "NoID", "No ID", "no bird", "(none)", "noise-free"))
    ),
    *(
        Case(
            f"unknown-{n}",
            f"file,label\na.wav,robin\nb.wav,{text}\n",
            (WHOLE[0], f"b.wav 0 30 {text}", "=open-label 1"),
        )
        for n, text in enumerate(("unknown", "Unidentified"))
    ),
    Case(
        "none-without-times",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,,,nocall\n",
        (
            "a.wav 0 10 robin",
            *(f"{name} {n} {n + 10}" for name in ("a.wav", "b.wav") for n in (10, 20)),
            "b.wav 0 10",
            "=no-label 1",
            "=no-events 1",
        ),
        ("--windows=10",),
    ),
    Case(
        "none-as-class",
        "file,robin,nocall\na.wav,1,0\nb.wav,0,1\n",
        (WHOLE[0], "b.wav", "=no-label 1"),
    ),
    _raven(
        "a.nocall.txt",
        "Begin File\tCommon Name\tSpecies Code",
        "1\tS\t1\t2\t3\t1\t9\ta.wav\trobin\trobin",
        "2\tS\t1\t4\t5\t1\t9\tb.wav\tnocall\tnocall",
        rows=("a.wav 2 3 robin", "b.wav 4 5", "=no-label 1"),
    ),
    Case(
        "no-id-of-bats",
        f"{KALEIDOSCOPE}\n/x,A,x.wav,0,2,1,1,2,NoID,\n/x,B,x.wav,0,2,1,1,2,PIPPIP,\n",
        ("A/x.wav 2 3", "B/x.wav 2 3 PIPPIP", "=no-label 1"),
    ),
    Case("numpy", "file,label\na.wav,np.str_('robin')\nb.wav,b'wren'\n", WHOLE),
    Case("entities", "file,label\na.wav,Bewick&#39;s Wren\n", ("a.wav 0 30 Bewick's Wren",)),
    Case("mapping", "file,label\na.wav,\"{'robin': 1}\"\n", ("!write the labels alone",)),
    Case(
        "numbers-between",
        'file,labels\na.wav,"3,5"\nb.wav,3\nA/x.wav,5\n',
        ("!split it with --separator ','",),
    ),
    Case(
        "score-behind", "file,label\na.wav,robin 0.93\n", ("!write 0.93 into a column of its own",)
    ),
    _text(
        "two-alphabets",
        "utf-8",
        "r\u043ebin",
        "wren",
        ("a.wav 0 30 r\u043ebin", WHOLE[1], "=similar-labels 1"),
    ),
    Case("lines-of-a-cell", 'file,label\na.wav,"robin\nwren"\n', ("!--separator '|'",)),
    Case(
        "score-in-a-label",
        "file,label\na.wav,AMRO;0.98\n",
        ("!write 0.98 into a column of its own",),
    ),
    Case(
        "score-split-off",
        "file,label\na.wav,AMRO;0.98\n",
        ("!the number 0.98 among its labels",),
        ("--separator=;",),
    ),
    Case(
        "excel-error",
        "file,label\na.wav,#N/A\n",
        ("!'#N/A' as its 'label', an error of a spreadsheet",),
    ),
    Case("excel-error-first", "label,file\n#REF!,a.wav\nrobin,b.wav\n", ("!'#REF!'",)),
    Case(
        "marks",
        "file,label\na.wav,--\nb.wav,????\n",
        ("a.wav", "b.wav 0 30 ????", "=no-label 1", "=open-label 1"),
    ),
    Case("a.quoted.txt", '"2"\t"3"\t"robin"\n', ("a.wav 2 3 robin",)),
    _text("mac-roman", "mac-roman", "W\u00fcrger", "M\u00f6nch", ("!--encoding",)),
    _text(
        "mac-roman-named",
        "mac-roman",
        "W\u00fcrger",
        "M\u00f6nch",
        ("a.wav 0 30 W\u00fcrger", "b.wav 0 30 M\u00f6nch", "=other-encoding 1"),
        "--encoding=mac-roman",
    ),
    _text("czech", "cp1250", "kos \u010dern\u00fd", "s\u00fdkora", ("!--encoding",)),
    _text("polish", "cp1250", "Jask\u00f3\u0142ka", "\u017buraw", ("!--encoding",)),
    _text(
        "russian",
        "cp1251",
        "\u0421\u0438\u043d\u0438\u0446\u0430",
        "\u0417\u044f\u0431\u043b\u0438",
        ("!--encoding",),
    ),
    _text(
        "japanese", "shift-jis", "\u30a6\u30b0\u30a4\u30b9", "\u30e1\u30b8\u30ed", ("!--encoding",)
    ),
    _text("utf-32", "utf-32", "robin", "wren", (*WHOLE, "=other-encoding 1")),
    _text(
        "garbled",
        "utf-8",
        "W\u00c3\u00bcrger",
        "wren",
        ("a.wav 0 30 W\u00c3\u00bcrger", WHOLE[1], "=similar-labels 1"),
    ),
    _text(
        "apostrophes",
        "utf-8",
        "Bewick's Wren",
        "Bewick\u2019s Wren",
        ("a.wav 0 30 Bewick's Wren", "b.wav 0 30 Bewick\u2019s Wren", "=similar-labels 1"),
    ),
    _text("no-width", "utf-8", "rob\u200bin", "wren", WHOLE),
)
CASES = (*NAMES_AND_VALUES, *SPLITS_AND_DATES, *FILES, *TIMES, *TEXTS)
