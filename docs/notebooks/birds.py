# %% [markdown]
# # Notebook: a bird model from a folder of recordings
#
# After this page you can go from a folder of recordings to a Raven table of detections, in four
# commands.
# It takes two minutes on two cores. [The notebook](birds.py) is plain Python with cells,
# and also has the code that makes recordings and pictures.

# %% [hidden]
import csv
import json
import pathlib
import subprocess

import matplotlib.pyplot as plt
import numpy as np
import soundfile


def run(command, last=8):
    """Run a command and print the last lines of its output."""
    done = subprocess.run(
        command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(f"$ {command}", *done.stdout.splitlines()[-last:], sep="\n")
    done.check_returncode()


# %% [markdown]
# ## The recordings
#
# Put your own recordings into a folder for each class.
# Here, three invented species sing in 120 recordings each, and 120 recordings have no song.

# %% [hidden]
RATE = 32_000
SPECIES = {
    "riser": (2_000, 5_000, 0.4),
    "faller": (6_000, 3_000, 0.3),
    "whistler": (4_000, 4_000, 0.8),
}
rng = np.random.default_rng(0)


def song(species):
    first, last, seconds = SPECIES[species]
    t = np.arange(int(seconds * RATE)) / RATE
    pitch = rng.uniform(0.9, 1.1) * (first + (last - first) * t / seconds)
    return np.sin(2 * np.pi * np.cumsum(pitch) / RATE) * np.hanning(len(t)) * rng.uniform(0.1, 0.3)


def recording(seconds, songs):
    """Noise, with songs at their times."""
    sound = 0.01 * rng.standard_normal(int(seconds * RATE))
    for start, species in songs:
        one = song(species)
        sound[int(start * RATE) :][: len(one)] += one[: len(sound) - int(start * RATE)]
    return sound.astype(np.float32)


for species in [*SPECIES, "silence"]:
    for number in range(120):
        path = pathlib.Path("recordings", species, f"{species}-{number}.flac")
        path.parent.mkdir(parents=True, exist_ok=True)
        times = rng.uniform(0.1, 2.1, rng.integers(1, 4)) if species in SPECIES else []
        soundfile.write(path, recording(3, [(time, species) for time in times]), RATE)

# %% [markdown]
# ## Index and train
#
# `jaxtrain index` reads the headers of the recordings and keeps a fifth of them for testing.
# The audio stays in its place.
# `configs/folder.py` trains a small model on any such index, until its accuracy stops improving.
# Here it ends after 900 steps at the latest.

# %%
run("jaxtrain index recordings --out index --split recording=0.2")
run("jaxtrain train --config=folder:index --config.train.steps=900 2>&1 | grep -E 'test|ended at'")

# %% [markdown]
# Each evaluation counts, for each class, the answers that were right and the pairs that were
# confused.

# %% [hidden]
last = json.loads(pathlib.Path("runs/folder-index/classes.jsonl").read_text().splitlines()[-1])
names = json.loads(pathlib.Path("runs/folder-index/config.json").read_text())["model"][
    "class_names"
]
table = np.diag(last["right"])
for true, answer, rows in last["confused"]:
    table[true, answer] = rows
figure, axis = plt.subplots(figsize=(3.4, 3))
axis.imshow(table, cmap="Greys")
for (row, column), n in np.ndenumerate(table):
    axis.text(column, row, n, ha="center", va="center", color="C1")
axis.set(
    xticks=range(len(names)),
    xticklabels=names,
    yticks=range(len(names)),
    yticklabels=names,
    xlabel="answer",
    ylabel="class",
)
figure.tight_layout()

# %% [markdown]
# ## Detect
#
# A soundscape of one minute has eight songs at known times.

# %% [hidden]
truth = [(float(5 + 7 * i), list(SPECIES)[i % 3]) for i in range(8)]
pathlib.Path("field").mkdir(exist_ok=True)
soundfile.write("field/morning.wav", recording(60, truth), RATE)
pathlib.Path("classes.txt").write_text("\n".join(SPECIES))

# %%
run(
    "jaxtrain detect runs/folder-index field --out found --overlap 2 --threshold 0.7 --classes"
    " classes.txt"
)
selections = csv.DictReader(open("found/raven/morning.wav.selections.txt"), delimiter="\t")
for row in list(selections)[:3]:
    print(row["Begin Time (s)"], row["End Time (s)"], row["Annotation"], row["Score"])

# %% [markdown]
# The selections open in Raven.
# The lines above the spectrogram are detections, and the crosses are the true songs.

# %% [hidden]
rows = list(csv.DictReader(open("found/detections.csv")))
sound, _ = soundfile.read("field/morning.wav")
figure, axis = plt.subplots(figsize=(9, 3.5))
# noise is white
axis.specgram(sound, NFFT=1024, Fs=RATE, noverlap=512, cmap="Greys", vmin=-74, vmax=-55)
for number, species in enumerate(SPECIES):
    color, height = f"C{number}", 9_000 + 1_200 * number
    for row in rows:
        if species in row.values():
            axis.hlines(
                height, float(row["Start (s)"]), float(row["End (s)"]), color=color, linewidth=5
            )
    times = [start for start, name in truth if name == species]
    axis.plot(times, [height] * len(times), "x", color="black")
    axis.text(60.5, height, species, color=color, va="center")
axis.set(xlim=(0, 60), ylim=(0, 13_000), xlabel="seconds", ylabel="Hz")
figure.tight_layout()

# %% [markdown]
# ## Next
#
# - [Recordings](../recordings.md): tables of annotations, synonyms of classes, hours-long files.
# - [Detect, fit, search, review](../workloads/bird-inference.md): new classes from a few examples,
# a page to judge detections.
# - `jaxtrain report runs/folder-index --out report.html`: curves, confusions, and the time by
# activity.
