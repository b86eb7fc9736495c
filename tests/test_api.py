"""The public names work in a plain script and in the kernel of a notebook."""

import os
import pathlib
import subprocess
import sys

import jupyter_client.manager
import pytest

import jaxtrain
from tests.support.pages import examples

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the workload, config, loader and script of docs/your-model.md."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("my_workload.py", "my_config.py", "my_loader.py", "my_script.py"):
        (folder / name).write_text(examples()[name])
    return folder


@pytest.fixture(scope="module")
def env(folder):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return env | {"PYTHONPATH": f"{folder}:{ROOT}"}


def test_every_public_name_is_documented():
    assert 15 <= len(jaxtrain.__all__) <= 25
    page = (ROOT / "docs" / "api.md").read_text()
    for name in jaxtrain.__all__:
        meaning = getattr(jaxtrain, name).__doc__.splitlines()[0]
        assert meaning and f" {name}" in jaxtrain.__doc__.replace(",", " ,"), name
        assert f"\n::: jaxtrain.{name}\n" in page, f"docs/api.md lacks {name}"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = jaxtrain.nothing


def test_importing_the_package_imports_no_jax():
    code = "import sys, jaxtrain; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_script_trains_and_calls_the_model(folder, env):
    done = subprocess.run(
        [sys.executable, "my_script.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    last, values = done.stdout.splitlines()[-2:]
    loss, records = last.split()
    assert float(loss) < 0.5 and int(records) > 20, (
        "one record for each step that is written, and the evaluations"
    )
    assert abs(float(values.strip("[]")) - 4) < 1
    again = subprocess.run(
        [sys.executable, "my_script.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert again.stdout == done.stdout, "the run has ended, and its last evaluation is the same"


@pytest.mark.slow
def test_a_notebook_trains_and_an_error_there_is_an_exception(folder, env):
    manager, client = jupyter_client.manager.start_new_kernel(
        kernel_name="python3", cwd=str(folder), env=env
    )

    def run(code: str) -> tuple[dict, str]:
        printed: list[str] = []

        def collect(message: dict) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = client.execute_interactive(code, timeout=240, output_hook=collect)
        return reply["content"], "".join(printed)

    try:
        small = '{"train.steps": 3, "workdir": "runs/notebook"}'
        reply, printed = run(
            f"import jaxtrain\ndone = jaxtrain.train('my_config.py', {small})\nprint(done.step,"
            " type(done.state))"
        )
        assert reply["status"] == "ok" and "3 <class" in printed, (reply, printed)
        reply, _ = run("jaxtrain.train('my_config.py', {'train.stepps': 3})")
        assert (reply["status"], reply["ename"]) == ("error", "ConfigError")
        assert (
            reply["evalue"]
            == "config.train.stepps does not exist; expected one of: steps, batch, accumulate,"
            " auto, ema, "
            + "eval_every, eval_batches, patience, min_delta, patience_from, target; did you mean"
            " 'steps'?"
        )
        reply, printed = run(
            "print(jaxtrain.load('runs/notebook', workload='my_workload')(x=[[0.5] * 8]).shape)"
        )
        assert reply["status"] == "ok" and "(1,)" in printed, "the kernel goes on"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_model_that_is_not_there_is_an_error(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="runs/none"):
        jaxtrain.load("runs/none")
