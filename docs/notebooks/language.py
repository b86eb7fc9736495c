# %% [markdown]
# # Notebook: a language model from text files to transformers
#
# After this page you can train a language model on text files, continue prompts, and export it for
# transformers.
# It takes two minutes on two cores. [The notebook](language.py) is plain Python with cells,
# and also has the code that makes texts and pictures.

# %% [hidden]
import pathlib
import random
import re
import subprocess

import matplotlib.pyplot as plt


def run(command, last=8):
    """Run a command and print the last lines of its output."""
    done = subprocess.run(
        command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(f"$ {command}", *done.stdout.splitlines()[-last:], sep="\n")
    done.check_returncode()


# %% [markdown]
# ## The text
#
# Use your own `.txt`, `.jsonl` or Parquet files.
# Here, a small grammar writes 2,000 documents.

# %% [hidden]
random.seed(0)
BIRDS = {"wren": "hedge", "owl": "barn", "heron": "river", "lark": "field"}


def sentence():
    bird = random.choice(list(BIRDS))
    verb, when = (
        random.choice(["sings", "sleeps", "waits"]),
        random.choice(["at dawn", "at night", "in the rain"]),
    )
    return f"the {bird} {verb} {when} near the {BIRDS[bird]} ."


texts = pathlib.Path("texts")
texts.mkdir(exist_ok=True)
for number in range(20):
    documents = [" ".join(sentence() for _ in range(random.randint(2, 8))) for _ in range(100)]
    (texts / f"{number}.txt").write_text("\n".join(documents))
print(documents[0])

# %% [markdown]
# ## The tokenizer and the tokens
#
# Any `tokenizer.json` of Hugging Face works.
# This one has a token for each word.

# %%
import tokenizers

tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[unk]"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[unk]", "<|endoftext|>"])
tokenizer.train([str(path) for path in texts.iterdir()], trainer)
tokenizer.save("tokenizer.json")
run(
    "jaxtrain tokens corpus/train texts --tokenizer=tokenizer.json --eos='<|endoftext|>'"
    " --documents=line"
)

# %% [markdown]
# ## Train
#
# The config is Qwen3's architecture, with fields that make it small.
# `jaxtrain.train` is the command `jaxtrain train` as a function.

# %%
import jaxtrain

small = {
    "model.embed": 64,
    "model.depth": 2,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.head_dim": 16,
    "model.mlp": 128,
    "model.vocab": None,
    "model.context": 128,
    "model.dtype": "float32",
    "data.context": 128,
    "train.steps": 200,
    "train.batch": 16,
    "train.accumulate": 1,
    "train.eval_every": 100,
    "optim.lr": 3e-3,
    "optim.warmup": 0.1,
    "workdir": "runs/words",
}
done = jaxtrain.train("lm:qwen3-0.6b,corpus", small)
print(done.step, {name: round(value, 3) for name, value in done.evaluation.items()})

# %% [markdown]
# ## Plan the published size
#
# The plan needs no such GPU. It counts what the real step holds, with and without recomputed
# activations.
# The loops' arrays are a lower bound, which a compiler's figure replaces after `jaxtrain plan
# --setup gpu`.

# %% [hidden]
PARTS = ("parameters", "optimizer", "arrays that its loops keep")
figure, axis = plt.subplots(figsize=(7, 1.8))
for row, remat in enumerate(("none", "full")):
    command = f"jaxtrain plan --config=lm:qwen3-0.6b,corpus --config.model.remat={remat}"
    text = subprocess.run(
        f"{command} gpu:h100x1", shell=True, text=True, capture_output=True
    ).stdout
    left = 0.0
    for number, part in enumerate(PARTS):
        size = float(re.search(rf"^  {part} +([\d.]+) GB", text, re.M)[1])
        axis.barh(row, size, left=left, color=f"C{number}", label=part if not row else None)
        left += size
    print(f"remat={remat}: {left:.1f} GB")
axis.axvline(80, color="C3", linestyle=":")
axis.set(yticks=(0, 1), yticklabels=("remat=none", "remat=full"), xlabel="GB of an H100's 80")
axis.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1))
figure.tight_layout()

# %% [markdown]
# ## Continue prompts
#
# Each bird has a place of its own, and the model has learned it.

# %%
run(
    "jaxtrain generate runs/words 'the owl sings at dawn near the ' 'the lark sleeps at night near"
    " the ' --tokens 2 --temperature 0"
)

# %% [markdown]
# ## Export for transformers
#
# The folder has `config.json`, `model.safetensors` and the tokenizer.
# `AutoModelForCausalLM.from_pretrained("exported")` loads it.

# %%
run("jaxtrain export runs/words --out exported")
print(*sorted(path.name for path in pathlib.Path("exported").iterdir()))

# %% [markdown]
# ## Next
#
# - [Language models](../workloads/language.md): mixtures of corpora, adapters, scored prompts.
# - [Weights in and out](../weights.md): start from a folder of Hugging Face.
