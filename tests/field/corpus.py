"""Odd tables from practice, each with the rows that a person reads in it, or a word of the error
that refuses it.

    python -m tests.field.corpus FOLDER  writes recordings and tables there, to try them by hand

A case is a name, the table's content, its rows and the options of `jaxtrain index`. A row is
written "a.wav 2 3 robin|wren": recording, start and end in s, labels. "a.wav" alone is the whole
recording without a label. Rows that begin with "!" are words that the error must contain. All
tables are synthetic. A program's name says that the table has the form that this program writes.
"""

import json
import pathlib
import sys
import unicodedata
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import soundfile

RATE, SECONDS = 1000, 30.0
# NFD, as macOS writes names, and a name as most recorders write it.
RECORDINGS = (
    "a.wav",
    "b.wav",
    "A/x.wav",
    "B/x.wav",
    "B/deep/z.flac",
    "S1_20240523_053000.wav",
    unicodedata.normalize("NFD", "W\u00fcrger.wav"),
    "two words.wav",
    "#7.wav",
    "XC77.wav",
)
RAVEN = "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq (Hz)\tHigh Freq (Hz)"
KALEIDOSCOPE = "INDIR,FOLDER,IN FILE,CHANNEL,OFFSET,DURATION,Fmin,Fmax,AUTO ID,MANUAL ID"
TWO = ("a.wav 2 3 robin", "b.wav 4 5 wren")


class Case(NamedTuple):
    name: str  # of the case, and with an ending of the table
    content: str | bytes
    rows: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.name if "." in self.name else f"{self.name}.csv"


def _table(header: str, first: str, second: str) -> str:
    return f"{header}\n{first}\n{second}\n"


def _times(name: str, header: str, first: str = "2,3", second: str = "4,5") -> Case:
    """Two events, under other column names."""
    return Case(name, _table(header, f"a.wav,{first},robin", f"b.wav,{second},wren"), TWO)


def _raven(*lines: str, more: str = "Begin File\tSpecies") -> str:
    return "\n".join([f"{RAVEN}\t{more}", *lines]) + "\n"


def _dates(name: str, first: str, second: str, rows: tuple[str, ...], *options: str) -> Case:
    content = _table("file;label;date", f"a.wav;robin;{first}", f"b.wav;wren;{second}")
    return Case(name, content, rows, ("--split=date=2024-05-01", *options))


COLUMNS = (
    _times("plain", "file,start,end,label"),
    _times("units-in-brackets", "Filename,Start Time (s),End Time (s),Species eBird Code"),
    _times("units-in-square-brackets", "Filename,Start [s],End [s],Species"),
    _times("units-underscore", "filename,start_time_s,end_time_s,ebird_code"),
    _times("units-seconds", "file_name,start_seconds,end_seconds,primary_label"),
    _times("r-dots", '"sound.files","start","end","label"'),
    _times("r-dots-units", "Begin.File,Begin.Time..s.,End.Time..s.,Annotation"),
    _times("camel", "fileName,startTime,endTime,vernacularName"),
    _times("capitals", "FILE,START,END,LABEL"),
    _times("dcase", "Audiofilename,Starttime,Endtime,Class"),
    _times("sound-events", "filename,onset,offset,event_label"),
    _times("milliseconds", "file,Start (ms),End (ms),label", "2000,3000", "4000,5000"),
    _times("milliseconds-underscore", "file,start_ms,end_ms,label", "2000,3000", "4000,5000"),
    _times(
        "minutes",
        "file,start (min),end (min),label",
        "0.0333333333,0.05",
        "0.0666666667,0.0833333333",
    ),
    _times("milliseconds-glued", "file,startms,endms,label", "2000,3000", "4000,5000"),
    _times("microseconds", "file,start_us,end_\u00b5s,label", "2000000,3000000", "4000000,5000000"),
    _times(
        "clock-ms",
        "file,Start (hh:mm:ss.ms),End (hh:mm:ss.ms),label",
        "00:00:02.000,00:00:03.0",
        "00:00:04.000,0:00:05",
    ),
    Case(
        "samples-named",
        "file,start_sample,end_sample,label\na.wav,2,3,robin\n",
        ("!'start_sample' is in sample",),
        ("--start-column=start_sample", "--end-column=end_sample"),
    ),
    Case("percent", "file,start (%),end (%),label\na.wav,2,3,robin\n", ("!'start (%)' is in %",)),
    _times("durations", "file,start,duration,label", "2,1", "4,1"),
    _times("manifest", "audio_filepath,offset,duration,label", "2,1", "4,1"),
    _times("duration-ms", "file,start_ms,duration_ms,label", "2000,1000", "4000,1000"),
    _times("end-before-duration", "file,start,end,label,duration", "2,3", "4,5")._replace(
        content="file,start,end,duration,label\na.wav,2,3,30,robin\nb.wav,4,5,30,wren\n"
    ),
    _times(
        "clock",
        "Filename,start (hh:mm:ss),end (hh:mm:ss),species",
        "0:00:02,0:00:03",
        "00:00:04,00:00:05.0",
    ),
    _times("avisoft", "file,start time [s],end time [s],class label"),
    _times("arbimon-boxes", "recording,x1,x2,species"),
    _times("anuraset", "fname,min_t,max_t,species"),
    _times("timestamps", "filename,timestamp_s,end_s,label"),
    _times("german", "Datei,Beginn,Ende,Art"),
    _times("spanish", "archivo,inicio,fin,especie"),
    _times("perch-windows", "filename,window_start_s,window_end_s,label"),
    _times("units-in-words", "file,start in s,end in s,label"),
    Case(
        "unknown-pairs",
        "file,links,rechts,label\na.wav,2,3,robin\nb.wav,7,8,wren\n",
        ("!'links', 'rechts'",),
    ),
    Case(
        "taxonomy",
        "file,class,order,family,species\na.wav,Aves,Passeriformes,Turdidae,robin\n",
        ("a.wav 0 30 robin",),
    ),
    Case(
        "call-category",
        "file,start,end,category,species\na.wav,2,3,song,robin\n",
        ("a.wav 2 3 robin", "=unused-column 1"),
    ),
    Case(
        "arbimon",
        "recording,site,year,month,day,hour,min,species,songtype,x1,x2,y1,y2,frequency,validated,"
        "url,score,score\na.wav,S1,2024,5,23,5,30,robin,Common"
        " Song,2,3,100,200,200,1,https://x.org/a,0.5,0.4\nb.wav,S1,2024,5,23,5,30,wren,Common"
        " Song,4,5,100,200,200,0,https://x.org/b,0.5,0.4\n",
        ("a.wav 2 3 robin", "b.wav 4 5"),
    ),
    Case(
        "birdnet-r",
        "filepath,start,end,scientific_name,common_name,confidence,lat,lon,week,overlap,"
        "sensitivity,min_conf,"
        "species_list,model\n/x/a.wav,2,3,Erithacus,robin,0.9,-1,-1,-1,0,1,0.1,,BirdNET\n",
        ("a.wav 2 3 robin",),
    ),
    Case(
        "named-times",
        "file,w_from,w_until,label\na.wav,2,3,robin\n",
        ("a.wav 2 3 robin",),
        ("--start-column=w_from", "--end-column=w_until"),
    ),
    Case(
        "unknown-times",
        "file,begin_x,label\na.wav,2,robin\na.wav,7,wren\n",
        ("!'begin_x' looks like times",),
    ),
    Case(
        "unknown-numbers",
        "file,links,rechts,label\na.wav,2,3,robin\na.wav,7,8,wren\n",
        ("!'links', 'rechts'",),
    ),
    Case("start-alone", "file,start,label\na.wav,2,robin\n", ("!no end or duration",)),
    Case("end-alone", "file,end,label\na.wav,2,robin\n", ("!no start is known",)),
    Case("time-as-number", "file,time,label\na.wav,2.5,robin\n", ("!'time' looks like times",)),
    Case(
        "samples", "file,start_sample,end_sample,label\na.wav,2000,3000,robin\n", ("!start_sample",)
    ),
    Case(
        "unknown-label",
        "file,start,end,vogel\na.wav,2,3,robin\n",
        ("!'vogel' may be one", "!--label-column"),
    ),
    Case(
        "named-label",
        "file,start,end,vogel\na.wav,2,3,robin\n",
        ("a.wav 2 3 robin",),
        ("--label-column=vogel",),
    ),
    Case(
        "no-label-wanted",
        "file,start,end,vogel\na.wav,2,3,robin\n",
        ("a.wav 2 3",),
        ("--label-column=none",),
    ),
    Case(
        "wrong-name",
        "file,start,end,label\na.wav,2,3,robin\n",
        ("!did you mean 'label'",),
        ("--label-column=lable",),
    ),
    Case(
        "two-starts-agree",
        "file,start,begin time (s),end,label\na.wav,2,2,3,robin\n",
        ("a.wav 2 3 robin",),
    ),
    Case(
        "two-starts-differ",
        "file,start,begin time (s),end,label\na.wav,2,4,5,robin\n",
        ("!which differ",),
    ),
    Case(
        "wall-clock-start",
        "file,start,begin time (s),end time (s),label\na.wav,05:30,2,3,robin\n",
        ("a.wav 2 3 robin",),
    ),
    Case("list-column", "file\na.wav\nb.wav\n", ("a.wav", "b.wav")),
    Case("length-of-recordings", "file,label,duration\na.wav,robin,30\n", ("a.wav 0 30 robin",)),
    Case("bars", "file|start|end|label\na.wav|2|3|robin\n", ("a.wav 2 3 robin",)),
    Case("semicolons-commas", "file;start;end;label\na.wav;2,0;3,0;robin\n", ("a.wav 2 3 robin",)),
    Case("excel", "sep=;\nfile;start;end;label\na.wav;2,5;3,5;robin\n", ("a.wav 2.5 3.5 robin",)),
    Case("pandas-index", ",file,start,end,label\n0,a.wav,2,3,robin\n", ("a.wav 2 3 robin",)),
    Case(
        "pandas-unnamed",
        "Unnamed: 0,file,start,end,label\n0,a.wav,2,3,robin\n",
        ("a.wav 2 3 robin",),
    ),
    Case(
        "r-row-names",
        '"file","start","end","label"\n"1","a.wav",2,3,"robin"\n"2","b.wav",4,5,"wren"\n',
        TWO,
    ),
    Case(
        "twice-a-name", "file,start,end,label,label\na.wav,2,3,robin,note\n", ("a.wav 2 3 robin",)
    ),
    Case(
        "species-columns",
        "filename,gen,sp\nXC77.wav,Turdus,merula\n",
        ("XC77.wav 0 30 Turdus merula",),
    ),
    Case(
        "xeno-canto",
        "id,gen,sp,en,file,file-name,length,date\n"
        "77,Turdus,merula,Blackbird,https://xeno-canto.org/77/download,XC77.wav,0:30,2021-05-02\n",
        ("XC77.wav 0 30 Turdus merula",),
    ),
    Case(
        "urban-sounds",
        "slice_file_name,fsID,start,end,salience,fold,classID,class\n"
        "a.wav,100,58.5,62.5,1,5,2,robin\n",
        ("a.wav 0 30 robin",),
    ),
    Case(
        "notes-first", "notes,file,start,end,label\nwindy,a.wav,2,3,robin\n,b.wav,4,5,wren\n", TWO
    ),
)

WIDE = (
    Case("wide", "file,start_time,end_time,robin,wren\na.wav,2,3,1,0\nb.wav,4,5,0,1\n", TWO),
    Case(
        "wide-r",
        '"file","robin","wren"\n"a.wav",TRUE,FALSE\n"b.wav",FALSE,TRUE\n',
        ("a.wav 0 30 robin", "b.wav 0 30 wren"),
    ),
    Case(
        "wide-letters",
        "file,robin,wren\na.wav,T,F\nb.wav,F,T\n",
        ("a.wav 0 30 robin", "b.wav 0 30 wren"),
    ),
    Case(
        "wide-words",
        "file,robin,wren\na.wav,yes,no\nb.wav,No,Yes\n",
        ("a.wav 0 30 robin", "b.wav 0 30 wren"),
    ),
    Case(
        "wide-floats",
        "file,robin,wren\na.wav,1.0,0.0\nb.wav,0.0,1.0\n",
        ("a.wav 0 30 robin", "b.wav 0 30 wren"),
    ),
    Case("wide-blanks", "file,start,end,robin,wren\na.wav,2,3,1,\nb.wav,4,5,,1\n", TWO),
    Case("wide-na", "file,start,end,robin,wren\na.wav,2,3,1,NA\nb.wav,4,5,NaN,1\n", TWO),
    Case(
        "wide-notes", "file,start,end,robin,wren,notes\na.wav,2,3,1,0,\nb.wav,4,5,0,1,windy\n", TWO
    ),
    Case(
        "wide-observer", "file,start,end,robin,wren,wer\na.wav,2,3,1,0,Ada\nb.wav,4,5,0,1,Bo\n", TWO
    ),
    Case("wide-both", "file,start,end,robin,wren\na.wav,2,3,1,1\n", ("a.wav 2 3 robin|wren",)),
    Case(
        "wide-neither",
        "file,start,end,robin,wren\na.wav,2,3,1,0\nb.wav,4,5,0,0\n",
        ("a.wav 2 3 robin", "b.wav 4 5"),
    ),
    Case("wide-unknown", "file,robin,wren\na.wav,1,-1\nb.wav,0,1\n", ("!'wren' holds -1",)),
    Case("wide-twice", "file,robin,wren\na.wav,1,0\na.wav,0,1\n", ("!conflicting-labels",)),
    Case("wide-counts", "file,robin,wren,crow\na.wav,1,0,3\nb.wav,0,1,0\n", ("!'crow' holds 3",)),
    Case(
        "wide-scores",
        "file,robin,wren,crow\na.wav,1,0,0.93\nb.wav,0,1,0\n",
        ("!'crow' holds 0.93",),
    ),
    Case(
        "wide-named",
        "file,robin,wren,crow\na.wav,1,0,3\nb.wav,0,1,0\n",
        ("a.wav 0 30 robin", "b.wav 0 30 wren"),
        ("--label-column=robin,wren",),
    ),
    Case("one-class", "itemid,hasbird\na,1\nb,0\n", ("a.wav 0 30 hasbird", "b.wav")),
    Case("numeric-class", "file,class,notes\na.wav,3.0,x\nb.wav,,y\n", ("a.wav 0 30 3", "b.wav")),
    Case("numeric-class-int", "file,class\na.wav,3\nb.wav,4\n", ("a.wav 0 30 3", "b.wav 0 30 4")),
    Case(
        "na-label",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5,NA\n",
        ("a.wav 2 3 robin", "b.wav 4 5"),
    ),
)

LABELS = (
    Case(
        "semicolon-labels",
        "file,label\na.wav,Parus major;Turdus merula\nb.wav,Parus major\n",
        ("!--separator ';'",),
    ),
    Case(
        "semicolon-split",
        "file,label\na.wav,Parus major;Turdus merula\n",
        ("a.wav 0 30 Parus major|Turdus merula",),
        ("--separator=;",),
    ),
    Case(
        "comma-labels",
        'file,labels\na.wav,"robin,wren"\nb.wav,robin\nb.wav,wren\n',
        ("!--separator ','",),
        ("--on=conflicting-labels=keep",),
    ),
    Case("comma-name", 'file,label\na.wav,"Bunting, Reed"\n', ("a.wav 0 30 Bunting, Reed",)),
    Case("list-labels", "file,labels\na.wav,\"['robin', 'wren']\"\n", ("a.wav 0 30 robin|wren",)),
    Case(
        "odd-blanks",
        "file,start,end,label\na.wav,2,3,Parus\u00a0major\nb.wav,4,5,Parus  major\n",
        ("a.wav 2 3 Parus major", "b.wav 4 5 Parus major"),
    ),
    Case(
        "two-forms",
        "file,start,end,label\na.wav,2,3,W\u00fcrger\nb.wav,4,5,Wu\u0308rger\n",
        ("a.wav 2 3 W\u00fcrger", "b.wav 4 5 W\u00fcrger"),
    ),
    Case("quote-inside", 'file,start,end,label\na.wav,2,3,5" bird\n', ('a.wav 2 3 5" bird',)),
    Case(
        "arbimon-validated",
        "recording,x1,x2,species,validated\na.wav,2,3,robin,present\nb.wav,4,5,wren,not present\n",
        ("a.wav 2 3 robin", "b.wav 4 5"),
    ),
    Case(
        "answers",
        "file,start,end,label,answer,asked,score\na.wav,2,3,robin,yes,robin,0.9\n"
        "b.wav,4,5,,skip,wren,0.5\n",
        ("a.wav 2 3 robin",),
    ),
    Case("wrong-answer", "file,start,end,label,answer\na.wav,2,3,robin,green\n", ("!green",)),
    Case(
        "some-without-times",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,,,wren\n",
        ("!no-times",),
    ),
    Case(
        "weak-labels",
        "file,start,end,label\na.wav,,,robin\nb.wav,,,wren\n",
        ("a.wav 0 30 robin", "b.wav 0 30 wren"),
    ),
    Case(
        "same-times",
        "file,start,end,label\na.wav,2,3,robin\na.wav,2,3,wren\n",
        ("a.wav 2 3 robin|wren",),
    ),
    Case(
        "other-bands",
        "file,start,end,low_freq,high_freq,label\na.wav,2,3,10,20,robin\na.wav,2,3,100,200,robin\n",
        ("a.wav 2 3 robin", "a.wav 2 3 robin"),
    ),
    Case(
        "twice-a-row",
        "file,start,end,label\na.wav,2,3,robin\na.wav,2,3,robin\n",
        ("a.wav 2 3 robin",),
    ),
)

KEYS = (
    Case(
        "joined-raven.txt",
        _raven(
            *(
                f"1\tSpectrogram 1\t1\t{2 + 2 * n}\t{3 + 2 * n}\t1\t9\t{file}.wav\t{label}"
                for n, (file, label) in enumerate((("a", "robin"), ("b", "wren")))
            )
        ),
        TWO,
    ),
    Case(
        "views.txt",
        _raven(
            "1\tWaveform 1\t1\t2\t3\t1\t9\ta.wav\trobin",
            "1\tSpectrogram 1\t1\t2\t3\t1\t9\ta.wav\trobin",
        ),
        ("a.wav 2 3 robin",),
    ),
    Case(
        "views-other-label.txt",
        _raven(
            "1\tWaveform 1\t1\t2\t3\t1\t9\ta.wav\trobin",
            "1\tSpectrogram 1\t1\t2\t3\t1\t9\ta.wav\twren",
        ),
        ("a.wav 2 3 robin|wren",),
    ),
    Case(
        "file-offset.txt",
        _raven(
            "1\tS\t1\t2\t3\t1\t9\ta.wav\t2\trobin",
            "2\tS\t1\t34\t35\t1\t9\tb.wav\t4\twren",
            more="Begin File\tFile Offset (s)\tSpecies",
        ),
        TWO,
    ),
    Case(
        "file-offset.csv",
        "Begin File,Begin Time (s),End Time (s),File Offset (s),Species\n"
        "a.wav,2,3,2,robin\nb.wav,34,35,4,wren\n",
        TWO,
    ),
    Case(
        "file-offset-r",
        "Begin.File,Begin.Time..s.,End.Time..s.,File.Offset..s.,Species\n"
        "a.wav,2,3,2,robin\nb.wav,34,35,4,wren\n",
        TWO,
    ),
    Case(
        "file-offset-delta",
        "Begin File,File Offset (s),Delta Time (s),Species\na.wav,2,1,robin\nb.wav,4,1,wren\n",
        TWO,
    ),
    Case(
        "folder-a",
        "file,label\nA/x.wav,robin\nB/x.wav,wren\n",
        ("A/x.wav 0 30 robin", "B/x.wav 0 30 wren"),
    ),
    Case("folder-windows", "file,label\nC:\\data\\A\\x.wav,robin\n", ("A/x.wav 0 30 robin",)),
    Case("folder-elsewhere", "file,label\n/mnt/B/x.wav,robin\n", ("B/x.wav 0 30 robin",)),
    Case("folder-contradicts", "file,label\nC/x.wav,robin\n", ("!missing-file", "!contradicts")),
    Case("folder-contradicts-above", "file,label\nA/deep/z.flac,robin\n", ("!missing-file",)),
    Case(
        "folder-column",
        "folder,file,label\nA,x.wav,robin\nB,x.wav,wren\n",
        ("A/x.wav 0 30 robin", "B/x.wav 0 30 wren"),
    ),
    Case("folder-column-contradicts", "directory,file,label\nC,x.wav,robin\n", ("!missing-file",)),
    Case("no-folder", "file,label\nx.wav,robin\n", ("!ambiguous-name",)),
    Case(
        "kaleidoscope",
        f"{KALEIDOSCOPE}\nD:\\rec,A,x.wav,0,2,1,1,2,Pluvialis,Turdus\n",
        ("A/x.wav 2 3 Turdus",),
    ),
    Case(
        "kaleidoscope-auto",
        f"{KALEIDOSCOPE}\nD:\\rec,A,x.wav,0,2,1,1,2,Pluvialis,\n",
        ("A/x.wav 2 3 Pluvialis",),
    ),
    Case(
        "kaleidoscope-folder",
        f"{KALEIDOSCOPE}\nD:\\rec,C,x.wav,0,2,1,1,2,Pluvialis,\n",
        ("!missing-file",),
    ),
    Case("composed", "file,label\nW\u00fcrger.wav,robin\n", (f"{RECORDINGS[6]} 0 30 robin",)),
    Case("any-case", "file,label\nA.WAV,robin\n", ("a.wav 0 30 robin",)),
    Case("without-ending", "file,label\nz,robin\n", ("B/deep/z.flac 0 30 robin",)),
    Case("other-ending", "file,label\nz.wav,robin\n", ("B/deep/z.flac 0 30 robin",)),
    Case(
        "two-that-mean-one", "file,label\n/one/a.mp3,robin\n/two/a.mp3,wren\n", ("!ambiguous-name",)
    ),
    Case(
        "escaped",
        "file,label\nfile:///home/me/two%20words.wav,robin\n",
        ("two words.wav 0 30 robin",),
    ),
    Case("two-words", 'file,label\n"two words.wav",robin\n', ("two words.wav 0 30 robin",)),
)

TEXT = (
    _dates("days-first", "23/05/2024", "01/04/2024", ("test a.wav", "train b.wav")),
    _dates("months-first", "05/23/2024", "04/01/2024", ("test a.wav", "train b.wav")),
    _dates("either-first", "01/06/2024", "02/03/2024", ("!--dates day-first or month-first",)),
    _dates(
        "either-said",
        "01/06/2024",
        "02/03/2024",
        ("test a.wav", "train b.wav"),
        "--dates=day-first",
    ),
    _dates(
        "either-said-months",
        "01/06/2024",
        "02/07/2024",
        ("train a.wav", "train b.wav"),
        "--dates=month-first",
    ),
    _dates("both-first", "23/05/2024", "05/23/2024", ("!has its day first",)),
    _dates(
        "said-otherwise",
        "23/05/2024",
        "01/04/2024",
        ("!--dates is month-first",),
        "--dates=month-first",
    ),
    _dates("german-dates", "23.05.2024", "1.4.2024", ("test a.wav", "train b.wav")),
    _dates("month-names", "23 May 2024", "April 1, 2024", ("test a.wav", "train b.wav")),
    _dates("month-names-french", "23 mai 2024", "1 avril 2024", ("test a.wav", "train b.wav")),
    _dates(
        "month-names-german", "23. Mai 2024", "1. M\u00e4rz 2024", ("test a.wav", "train b.wav")
    ),
    _dates("dates-of-pandas", "20240523.0", "20240401.0", ("test a.wav", "train b.wav")),
    _dates("iso-times", "2024-05-23T05:30:00Z", "2024-04-01 05:30", ("test a.wav", "train b.wav")),
    _dates("basic-dates", "20240523", "20240401", ("test a.wav", "train b.wav")),
    _dates("impossible", "31/02/2024", "01/04/2024", ("!bad-date", "!31/02/2024")),
    _dates("impossible-iso", "2024-13-01", "2024-04-01", ("!bad-date",)),
    _dates("serial", "45435", "45383", ("!'45435' is no date",)),
    _dates("two-digits", "23/05/24", "01/04/24", ("!'23/05/24' is no date",)),
    _dates("no-date-wanted", "45435", "45383", ("!have no date",), "--date-column=none"),
    Case(
        "date-of-name",
        "file,label\nS1_20240523_053000.wav,robin\n",
        ("test S1_20240523_053000.wav",),
        ("--split=date=2024-05-01",),
    ),
    Case(
        "folds",
        "file,label,fold\na.wav,robin,5.0\nb.wav,wren,1.0\n",
        ("test a.wav", "train b.wav"),
        ("--split=column=fold:5",),
    ),
    Case(
        "folds-float",
        "file,label,fold\na.wav,robin,5\nb.wav,wren,1\n",
        ("test a.wav", "train b.wav"),
        ("--split=column=fold:5.0",),
    ),
    Case(
        "cp1252",
        "file,label\r\na.wav,Swainson\u2019s Thrush\r\n".encode("cp1252"),
        ("a.wav 0 30 Swainson\u2019s Thrush",),
    ),
    Case(
        "utf-8-mark",
        "file,label\na.wav,W\u00fcrger\n".encode("utf-8-sig"),
        ("a.wav 0 30 W\u00fcrger",),
    ),
    Case(
        "utf-16", "file\tlabel\na.wav\tW\u00fcrger\n".encode("utf-16"), ("a.wav 0 30 W\u00fcrger",)
    ),
    Case(
        "utf-16-no-mark",
        "file\tlabel\na.wav\tW\u00fcrger\n".encode("utf-16-le"),
        ("a.wav 0 30 W\u00fcrger",),
    ),
    Case(
        "mixed",
        "file,label\na.wav,W\u00fcrger\n".encode() + "b.wav,W\u00fcrger\n".encode("cp1252"),
        ("!:3 holds the byte fc",),
    ),
    Case("no-encoding", b"file,label\na.wav,W\x81rger\n", ("!:2 holds the byte 81",)),
    Case(
        "old-mac", "file,label\ra.wav,robin\rb.wav,wren\r", ("a.wav 0 30 robin", "b.wav 0 30 wren")
    ),
    Case("line-separators", "file,notes,label\na.wav,x\u2028y,robin\n", ("a.wav 0 30 robin",)),
    Case(
        "lines-of-a-header",
        '"file","Start\n(s)","End\n(s)","label"\na.wav,2,3,robin\nb.wav,4,5,wren\n',
        TWO,
    ),
    Case(
        "too-many",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5,wren,loud\n",
        ("!:3 has 5 cells, and the header 4",),
    ),
    Case(
        "too-few",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5\n",
        ("!:3 has 3 cells, and the header 4",),
    ),
    Case(
        "trailing-separators",
        "file,start,end,label,,\na.wav,2,3,robin,,\nb.wav,4,5,wren,,,,\n",
        TWO,
    ),
    Case(
        "decimal-comma-unquoted",
        "file,start,end,label\na.wav,2,5,3,5,robin\n",
        ("!cells, and the header 4",),
    ),
    Case(
        "decimal-comma-mixed",
        "file;start;end;label\na.wav;2,5;3.5;robin\n",
        ("!no number of seconds",),
    ),
    Case(
        "thousands", 'file,start,end,label\na.wav,"1,234.5",3,robin\n', ("!no number of seconds",)
    ),
    Case(
        "open-quote",
        'file,start,end,label\na.wav,2,3,"robin\nb.wav,4,5,wren\n',
        ("!cannot be read as a line",),
    ),
    Case(
        "open-quote-closed-later",
        'file,start,end,label\na.wav,2,3,"robin\nb.wav,4,5,"wren"\n',
        ("!cannot be read as a line",),
    ),
    Case(
        "quoted-lines",
        'file,notes,start,end,label\na.wav,"loud\nclose",2,3,robin\nb.wav,"one\n\ntwo",4,5,wren\n',
        TWO,
    ),
    Case("headless", "a.wav,2,3,robin\nb.wav,4,5,wren\n", ("!is no table that names recordings",)),
    Case(
        "number-words", "file,start,end,label\na.wav,two,3,robin\n", ("!has 'two' as its 'start'",)
    ),
    _times(
        "seconds-words",
        "file,start,end,label",
        "2s,3.0 sec",
        "0 days 00:00:04,0 days 00:00:05.000000",
    ),
    Case(
        "seconds-in-ms",
        "file,start_ms,end_ms,label\na.wav,2s,3s,robin\n",
        ("!'2s' as its 'start_ms'",),
    ),
    Case(
        "minutes-seconds",
        "file,start,end,label\na.wav,0:02,0:03,robin\n",
        ("!no number of seconds",),
    ),
    Case("infinite", "file,start,end,label\na.wav,2,inf,robin\n", ("!no number of seconds",)),
    Case("reversed", "file,start,end,label\na.wav,3,2,robin\n", ("!reversed-times",)),
    Case("beyond", "file,start,end,label\na.wav,2,99,robin\n", ("!beyond-end",)),
    Case(
        "milliseconds-unsaid",
        "file,start,end,label\na.wav,2000,3000,robin\n",
        ("!outside-recording",),
    ),
)

COUNTED = (
    Case(
        "comments",
        "# made by hand\nfile,start,end,label\na.wav,2,3,robin\n",
        ("a.wav 2 3 robin", "=comment-line 1"),
    ),
    Case(
        "comments-between",
        "file,start,end,label\n# first\na.wav,2,3,robin\n#b.txt,4,5,wren\n",
        ("a.wav 2 3 robin", "=comment-line 2"),
    ),
    Case("number-sign", "file,start,end,label\n#7.wav,2,3,robin\n", ("#7.wav 2 3 robin",)),
    Case("list.txt", "a.wav\n# b.wav later\nb.wav\n", ("a.wav", "b.wav", "=comment-line 1")),
    Case(
        "absent",
        "file,label\na.wav,robin\nnone.wav,wren\n",
        ("a.wav 0 30 robin", "=missing-file 1"),
        ("--on=missing-file=drop",),
    ),
    Case(
        "a.Table.1.selections.txt",
        f"{RAVEN}\tSpecies\n",
        ("a.wav 0 10", "a.wav 10 20", "a.wav 20 30", "=no-events 1"),
        ("--windows=10",),
    ),
    Case(
        "a.txt", "", ("a.wav 0 10", "a.wav 10 20", "a.wav 20 30", "=no-events 1"), ("--windows=10",)
    ),
    Case("b.txt", "4.0\t5.0\twren\n\\\t100\t200\n", ("b.wav 4 5 wren",)),
    Case("b.labels.txt", "4,0\t5,0\twren\r\n6,0\t7,0\t\r\n", ("b.wav 4 5 wren", "b.wav 6 7")),
    Case(
        "b.BirdNET.results.csv",
        "Start (s),End (s),Scientific name,Common name,Confidence\n4,5,Troglodytes,wren,0.9\n",
        ("b.wav 4 5 wren", "=unused-column 1"),
    ),
    Case(
        "b.BirdNET.selection.table.txt",
        f"{RAVEN}\tCommon Name\tSpecies Code\tConfidence\tBegin Path\tFile Offset (s)\n"
        "1\tSpectrogram 1\t1\t4\t5\t0\t400\twren\twinwre\t0.9\tC:\\b.wav\t4\n",
        ("b.wav 4 5 winwre", "=unused-column 1"),
    ),
    Case(
        "other-encoding",
        "file,label\na.wav,W\u00fcrger\n".encode("cp1252"),
        ("a.wav 0 30 W\u00fcrger", "=other-encoding 1"),
    ),
    Case(
        "similar",
        "file,start,end,label\na.wav,2,3,robin\nb.wav,4,5,Robin\n",
        ("a.wav 2 3 robin", "b.wav 4 5 Robin", "=similar-labels 1"),
    ),
)

# Reports of people about other programs, reproduced. docs/results/field-reports.md has the address
# of each.
REPORTS = (
    Case(
        "crowsetta-301.txt",
        f"{RAVEN.replace('Channel', 'Channel' + chr(9) + 'Begin File')}\tCommon Name\tScientific"
        " Name\tConfidence\tSurvey Time (UTC)\tConfirmed\n1\tSpectrogram"
        " 1\t1\ta.wav\t2\t3\t0\t9\trobin\tErithacus\t0.9\t2026-08-22T05:30:00Z\tyes\n",
        ("a.wav 2 3 robin", "=unused-column 3"),
    ),
    Case(
        "b.Table.2.selections.txt",
        f"{RAVEN}\n1\tSpectrogram 1\t1\t4\t5\t1\t9\n",
        ("b.wav 4 5", "=no-label 1"),
    ),
    Case(
        "baw-server-890",
        "Start (s),End (s),Scientific name,Common name,Confidence,File\n2,3.0,Melithreptus"
        " albogularis,robin,0.3482,/data/input/a.wav\n4,5,Malurus,wren,0.26,/data/input/b.wav\n",
        TWO,
    ),
    Case("baw-server-817", "file,start,end,label\na.wav,31,32,robin\n", ("!outside-recording",)),
    Case(
        "birdnet-855",
        "INDIR,FOLDER,IN"
        " FILE,OFFSET,DURATION,scientific_name,common_name,confidence,lat,lon,week,overlap,"
        "sensitivity\n/x,A,x.wav,2,1,Erithacus,robin,0.9,52,13,20,0,1\n",
        ("A/x.wav 2 3 robin",),
    ),
    Case(
        "a.result.csv",
        "Start (s);End (s);Scientific name;Common name;Confidence\n"
        "2.0;3.0;Cranioleuca pyrrhophia;Streifenscheitel-Baumschl\u00fcpfer;0.19843541\n",
        ("a.wav 2 3 Streifenscheitel-Baumschl\u00fcpfer",),
    ),
    Case(
        "a.scaper.txt",
        "2.0 3.0 siren\n4.5 5 two words\n",
        ("a.wav 2 3 siren", "a.wav 4.5 5 two words"),
    ),
    Case("a.markers.txt", "2.0\t3.0\n4.5\t5\n", ("a.wav 2 3", "a.wav 4.5 5", "=no-label 2")),
    Case("a.sonic.txt", "2.232199546\t5\t2.5\tTheme, tp\n", ("!has a number for its label",)),
    Case(
        "songexplorer-12", "a.wav,1000,1000,pulse,person\n", ("!is no table that names recordings",)
    ),
    Case("no-duration", "file,start,stop,label\na.wav,2,2,pulse\n", ("!reversed-times",)),
    Case(
        "epic-sounds-2",
        "file,start_sample,stop_sample,class\na.wav,2.5,3.5,robin\n",
        ("!'start_sample'",),
    ),
    Case(
        "orcadata-33",
        "dataset\twav_filename\tstart_time_s\tduration_s\tlocation\tdate\n"
        "podcast_round1\ta.wav\t2\t1\tDabob"
        " Bay, Seattle\t1960-10-28\n",
        ("a.wav 2 3",),
        ("--label-column=none",),
    ),
    Case(
        "orcadata-33-labels",
        "dataset\twav_filename\tstart_time_s\tduration_s\npodcast_round1\ta.wav\t2\t1\n",
        ("!'dataset' may be one",),
    ),
    Case(
        "birda-25",
        "file,label\na.wav,\u767d\u5934\u9e4e_Chinese Bulbul\n".encode("utf-8-sig"),
        ("a.wav 0 30 \u767d\u5934\u9e4e_Chinese Bulbul",),
    ),
    Case(
        "birdnet-384.txt",
        f"{RAVEN}\tCommon Name\tBegin Path\tFile Offset (s)\n1\tSpectrogram"
        " 1\t1\t6.7000000000694\t9.7000000000694\t0\t400\tWaldkauz\tx/a.wav\t6.7000000000694\n"
        "2\tSpectrogram"
        " 1\t1\t6.8000000000694\t9.8000000000694\t0\t400\tWaldkauz\tx/a.wav\t6.8000000000694\n",
        ("a.wav 6.7 9.7 Waldkauz", "a.wav 6.8 9.8 Waldkauz", "=overlapping-times 1"),
    ),
    Case(
        "luscinia-2",
        "file,start,end,label\na.wav,2,3,1\na.wav,2,3,1\na.wav,4,5,2\n",
        ("a.wav 2 3 1", "a.wav 4 5 2", "=duplicate-row 1"),
    ),
    Case(
        "warbler-25",
        '"sound.files","selec","start","end","bottom.freq","top.freq","sp"\n'
        '"a.wav",1,2,3,0.1,0.4,"robin"\n',
        ("a.wav 2 3 robin",),
    ),
    Case(
        "baw-server-227",
        "file,label,date,time\na.wav,robin,2015-07-14,05:30:00.500\n",
        ("a.wav 0 30 robin",),
    ),
    Case(
        "opensoundscape-579",
        "file,start_time,end_time,robin,wren\n/x/a.wav,2.0,3.0,1.0,0.0\n/x/b.wav,4.0,5.0,0.0,1.0\n",
        TWO,
    ),
)

OPPONENTS = (  # found by one who tried to break the rest
    Case(
        "odd-cell",
        "file,start,end,robin,wren\na.wav,2,3,1,?\nb.wav,4,5,0,1\n",
        ("!'wren' holds ?",),
    ),
    Case(
        "count-in-a-named-class",
        "file,start,end,robin,wren,crow\na.wav,2,3,1,0,0\nb.wav,4,5,0,1,0\na.wav,6,7,0,0,3\n",
        ("!'crow' holds '3'",),
        ("--label-column=robin,wren,crow",),
    ),
    Case(
        "few-shot",
        "Audiofilename,Starttime,Endtime,robin,wren\na.wav,2,3,POS,NEG\nb.wav,4,5,NEG,POS\n",
        TWO,
    ),
    Case(
        "trailing-commas",
        "file,label\na.wav,robin,\nb.wav,wren,\n",
        ("a.wav 0 30 robin", "b.wav 0 30 wren"),
    ),
    Case(
        "cell-without-a-name.txt",
        f"{RAVEN}\n1\tS\t1\t2\t3\t4.5\t9\trobin\n2\tS\t1\t4\t5\t7\t9\twren\n",
        ("!8 cells",),
    ),
    Case(
        "thousands-points",
        "Datei;Beginn (ms);Ende (ms);Art\na.wav;2.000;3.000;robin\n",
        ("!'2.000'", "!without ."),
    ),
    Case(
        "thousands-tabs.tsv",
        "file\tstart_ms\tend_ms\tlabel\na.wav\t2,000\t3,000\trobin\n",
        ("!'2,000'",),
    ),
    Case(
        "fractions-of-ms",
        "file,start_ms,end_ms,label\na.wav,2000.125,3000.5,robin\n",
        ("a.wav 2.000125 3.0005 robin",),
    ),
    Case(
        "parts-of-a-day",
        "file,start,end,label\na.wav,2.31E-05,3.47E-05,robin\n",
        ("!part of a day",),
    ),
    Case(
        "thousands-ms", 'file,start_ms,end_ms,label\na.wav,"1,500","2,500",robin\n', ("!'1,500'",)
    ),
)
CASES = (*REPORTS, *COLUMNS, *WIDE, *LABELS, *KEYS, *TEXT, *COUNTED, *OPPONENTS)


def write_recordings(folder: pathlib.Path) -> None:
    """Recordings of noise, all with different bytes."""
    for seed, name in enumerate(RECORDINGS):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        wave = np.random.default_rng(seed).normal(0, 0.1, round(RATE * SECONDS))
        soundfile.write(path, wave, RATE, "PCM_16")


def write(case: Case, folder: pathlib.Path) -> pathlib.Path:
    """Write the table of a case."""
    content = case.content if isinstance(case.content, bytes) else case.content.encode()
    (folder / case.file).write_bytes(content)
    return folder / case.file


def rows_of(out) -> list[tuple[str, str, float, float, tuple[str, ...]]]:
    """Split, recording, start, end and labels of each row."""
    names = json.loads((out / "index.json").read_text())["classes"]
    found = []
    for path in sorted((out / "data").iterdir()):
        for row in pq.read_table(path, columns=["audio", "start", "end", "labels"]).to_pylist():
            labels = tuple(sorted(names[i] for i in row["labels"]))
            found.append(
                (path.name.split("-")[0], row["audio"]["path"], row["start"], row["end"], labels)
            )
    return sorted(found)


if __name__ == "__main__":
    top = pathlib.Path(sys.argv[1])
    write_recordings(top / "recordings")
    for each in CASES:
        write(each, top)
