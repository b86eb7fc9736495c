"""Continuations: the cache gives the same as the whole sequence, draws follow the distribution, and
environments score them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.nn import sampling
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.types import Variables
from jaxtrain.workloads.language import environments
from jaxtrain.workloads.language import loss as language_loss
from jaxtrain.workloads.language import model as language
from tests.support.cases import initial
from tests.support.cases import language as language_case


@pytest.mark.parametrize("kind", ["llama3", "qwen3", "gpt2", "window"])
def test_the_cache_gives_what_the_whole_sequence_gives(kind):
    """The likeliest token is taken at each place, for prompts of several lengths, and compared with
    logits of the whole text so far."""
    changes = {
        "gpt2": dict(
            norm="layer",
            activation="gelu",
            positions="learned",
            bias=True,
            qkv_bias=True,
            tied=True,
            kv_heads=0,
        ),
        "window": dict(window=3),
    }
    if kind in changes:
        c = dataclasses.replace(language_case.TINY, **{"qk_norm": False, **changes[kind]})
        params = initial(language.make_specs(c))
    else:
        c, params = language_case.load(language_case.DATA / kind, language_case.context_of(kind))
    shard, n_new = language_case.alone(), 7
    length = np.array([5, 1, 8])
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, c.vocab, (3, 8), dtype="i4")
    found = jax.jit(
        lambda p, x, n: sampling.generate(
            c, p, x, n, jax.random.key(0), shard, n_new=n_new, temperature=0
        )
    )(params, prompt, length)
    logits = jax.jit(lambda p, b: language.logits(c, p, b, shard))
    for row in range(3):
        ids = [*prompt[row, : length[row]], *np.asarray(found)[row]]
        padded = np.zeros((1, 16), "i4")
        padded[0, : len(ids)] = ids
        batch = {
            "tokens": padded,
            "positions": np.arange(16, dtype="i4")[None],
            "segments": np.ones((1, 16), "i4"),
        }
        expected = np.asarray(logits(params, batch))[0].argmax(-1)[
            length[row] - 1 : length[row] - 1 + n_new
        ]
        np.testing.assert_array_equal(np.asarray(found)[row], expected)


def test_a_rows_draw_does_not_depend_on_the_other_rows_and_ends_at_the_end():
    c = language_case.TINY
    params = initial(language.make_specs(c))
    prompt = np.arange(12, dtype="i4").reshape(3, 4)
    run = jax.jit(
        lambda x, n, end: sampling.generate(
            c,
            params,
            x,
            n,
            jax.random.key(5),
            language_case.alone(),
            n_new=8,
            temperature=1.0,
            top_p=0.9,
            ends=(end,),
        ),
        static_argnums=2,
    )
    three = np.asarray(run(prompt, np.array([4, 4, 4]), -1))
    np.testing.assert_array_equal(run(prompt[:1], np.array([4]), -1)[0], three[0])
    assert len({tuple(row) for row in three}) == 3
    end = int(three[1, 2])
    cut = np.asarray(run(prompt, np.array([4, 4, 4]), end))[1]
    first = list(three[1]).index(end)
    assert cut.tolist() == [*three[1, :first], *[end] * (8 - first)]


def same_length(completion, answer):
    return len(completion) == len(answer)


async def is_right(*, completion, answer, state, **rest):
    assert state["prompt"] == rest["prompt"]
    return completion == answer


def load_environment(n=3):
    rows = [{"prompt": f"{i}", "answer": f"{2 * i}"} for i in range(n)]
    return environments.Environment(rows, environments.Rubric([same_length, is_right], [0.5, 1.0]))


def test_an_environment_scores_by_weighted_functions():
    prompts = environments.load(__name__, {"n": 5}, 3)
    assert [row["prompt"] for row in prompts.rows] == ["0", "1", "2"]
    means, rewards = prompts.score(["0", "3", "10"])
    assert rewards == [1.5, 0.5, 0.0]
    assert means == pytest.approx({"reward": 2 / 3, "same_length": 2 / 3, "is_right": 1 / 3})


def test_an_environment_that_cannot_be_used_is_an_error_of_the_config():
    for target, text in (
        (language.Target(module="no_such_module"), "No module named"),
        (language.Target(module=__name__, arguments={"m": "3"}), "load_environment"),
        (language.Target(module=__name__, arguments={"n": 0}), "0 prompts, 2 functions"),
    ):
        c = dataclasses.replace(language_case.TINY, targets=(target,))
        assert [text in problem for _, problem in c.validate()] == [True]
    c = dataclasses.replace(
        language_case.TINY, generation=language.Generation(prompts=("aé",), tokens=8), symbols="abc"
    )
    assert ["'é'" in text for _, text in c.validate_data({})] == [True]


def test_an_evaluation_has_samples_scores_perplexity_and_bits_per_byte():
    c = dataclasses.replace(
        language_case.TINY,
        generation=language.Generation(prompts=("0", "01"), tokens=4),
        targets=(language.Target(module=__name__, prompts=2, tokens=4),),
        symbols="".join(map(chr, range(48, 48 + 64))),
        bytes_per_token=2.0,
        n_test=(3, 4),
    )
    task = language_loss.make_task(
        config_lib.Config(model=c), language_case.alone(), language_case.BATCH
    )
    variables = Variables(initial(task.specs.params))
    found, lines = {}, []
    for trial in task.generative:
        numbers, some = trial.score(jax.device_get(jax.jit(trial.run)(variables)))
        found |= numbers
        lines += some
    assert [line["prompt"] for line in lines] == ["0", "01", "0", "1"] and all(
        len(x["continuation"]) == 4 for x in lines
    )
    assert found.keys() == {f"{__name__}/{k}" for k in ("reward", "same_length", "is_right")}
    batch = language_case.packed_batch(0) | {"source": np.arange(language_case.BATCH) % 3 == 0}
    sums = jax.jit(task.evaluate)(
        variables,
        {k: jnp.asarray(x, jnp.int32 if k == "source" else None) for k, x in batch.items()},
    )
    record = task.finish({name: float(x.total / x.weight) for name, x in sums.items()})
    a, b = (sums[f"cross_entropy_source_{i}"] for i in range(2))
    assert a.weight + b.weight == batch["mask"].sum() == sums["cross_entropy"].weight
    np.testing.assert_allclose(a.total + b.total, sums["cross_entropy"].total, rtol=1e-6)
    assert record["perplexity"] == pytest.approx(np.exp(record["cross_entropy"]))
    assert record["bits_per_byte"] == pytest.approx(record["cross_entropy"] / np.log(2) / 2)
    assert record["perplexity_source_1"] == pytest.approx(np.exp(float(b.total / b.weight)))


@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 4, 2)])
def test_a_mesh_continues_any_number_of_prompts_as_one_device_does(mesh):
    """Two prompts over four devices ended a run at its first evaluation."""
    c = dataclasses.replace(
        language_case.TINY,
        generation=language.Generation(prompts=("0", "01", "2"), tokens=4, temperature=0.0),
        symbols="".join(map(chr, range(48, 48 + 64))),
    )

    def lines(shard):
        task = language_loss.make_task(config_lib.Config(model=c), shard, language_case.BATCH)
        variables = Variables(initial(task.specs.params))
        [trial] = task.generative
        return trial.score(jax.device_get(jax.jit(trial.run)(variables)))[1]

    devices = make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)])
    assert lines(make_layout(devices, {}).shard) == lines(language_case.alone())
