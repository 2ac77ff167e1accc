"""The manifests are complete, and the commands of their containers train as one machine with as many ranks.

The pods are processes here, and the name of the first is replaced by 127.0.0.1; tests/machines has names and machines.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardwise.launch import cli
from shardwise.launch.commands import run
from shardwise.launch.job import Job, check
from tests.examples import kubernetes
from tests.harness.programs import run_program


def pod_of(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specification of the pods, and the object that has command and variables."""
    if kind == "job":
        pod = kubernetes.manifests("job.yaml")["Job"]["spec"]["template"]["spec"]
        return pod, pod["containers"][0]
    found = kubernetes.manifests("trainjob.yaml")
    jobs = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return jobs[0]["template"]["spec"]["template"]["spec"], found["TrainJob"]["spec"]["trainer"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_pods_have_memory_time_to_save_and_the_secret(kind: str) -> None:
    pod, runs = pod_of(kind)
    container = pod["containers"][0]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = kubernetes.manifests("storage.yaml")["PersistentVolumeClaim"]
    assert mounted["/checkpoints"]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    grace = next(word for word in runs["command"] if word.startswith("--grace=")).partition("=")[2]
    assert pod["terminationGracePeriodSeconds"] > float(grace)
    assert pod["restartPolicy"] == "Never" and container["image"]
    assert runs["env"][0] == {
        "name": "SHARDWISE_SECRET",
        "valueFrom": {"secretKeyRef": {"name": "shardwise", "key": "secret"}},
    }


def test_pods_of_the_job_have_names_and_are_replaced_after_they_saved() -> None:
    found = kubernetes.manifests("job.yaml")
    service, job = found["Service"], found["Job"]
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    command = pod["containers"][0]["command"]
    assert f"--master-addr={name}-0.{service['metadata']['name']}" in command
    assert spec["completionMode"] == "Indexed" and f"--nnodes={spec['completions']}" in command
    assert spec["parallelism"] == spec["completions"]
    rules = {tuple(rule["onExitCodes"]["values"]): rule for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert rules[(143,)]["action"] == "Ignore" and rules[(2,)]["action"] == "FailJob"
    assert all(rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"] for rule in rules.values())


def test_the_runtime_of_the_trainjob_is_one_of_torch() -> None:
    found = kubernetes.manifests("trainjob.yaml")
    runtime, train = found["TrainingRuntime"], found["TrainJob"]
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["runtimeRef"]["kind"] == "TrainingRuntime" and "torch" in runtime["spec"]["mlPolicy"]
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    # What Kubeflow Trainer puts the command into.
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_commands_of_pods_are_those_of_a_job(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = kubernetes.job_variables(1) if kind == "job" else kubernetes.trainjob_variables(1)
    jobs: list[Job] = []
    monkeypatch.setattr(run, "run_job", jobs.append)
    monkeypatch.chdir(kubernetes.EXAMPLES)
    with pytest.raises(SystemExit):
        cli.main(kubernetes.command(pod_of(kind)[1], given, tmp_path)[3:])
    check(jobs[0])
    assert (jobs[0].nodes, jobs[0].node_rank) == ("2", 1) and jobs[0].args == (f"--out={tmp_path}/resumable",)


@pytest.mark.thorough
@pytest.mark.limit(200)
@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_pods_train_as_one_machine(kind: str, tmp_path: Path) -> None:
    _, runs = pod_of(kind)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    options = ("--steps=2", "--pause=0")
    pods = []
    for index in range(2):
        given = kubernetes.job_variables(index) if kind == "job" else kubernetes.trainjob_variables(index)
        words = kubernetes.command(runs, given, tmp_path / "pods", *options)
        first = next(word for word in words if word.startswith("--master-addr="))
        words[words.index(first)] = "--master-addr=127.0.0.1"
        words = [word for word in words if not word.startswith("--master-port=")]
        words.insert(4, f"--master-port={port}")
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | given
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        pods.append(subprocess.Popen(words, env=environment, cwd=kubernetes.EXAMPLES, **pipes))
    said = [pod.communicate(timeout=150)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said

    config = json.loads((kubernetes.EXAMPLES / "resumable.json").read_text())
    del config["checkpoint"]["memory_copies"]  # for which the launcher has a place
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = (*options, f"--out={tmp_path}/alone", f"--config={tmp_path}/config.json")
    run_program(kubernetes.EXAMPLES / "resumable.py", *options)
    expected = kubernetes.state(tmp_path / "alone" / "global_step2")
    found = kubernetes.state(tmp_path / "pods" / "resumable" / "global_step2")
    assert len(expected) > 10 and expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_the_command_of_the_page_makes_the_secret_that_pods_read() -> None:
    page = (kubernetes.EXAMPLES.parent / "docs" / "clusters.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("kubectl create secret"))
    assert f"#   {command}" in (kubernetes.EXAMPLES / "kubernetes" / "job.yaml").read_text()
    done = subprocess.run(
        ["bash", "-c", f"{command} --dry-run=client -o yaml"], capture_output=True, text=True, check=True
    )
    made = yaml.safe_load(done.stdout)
    assert made["metadata"]["name"] == "shardwise" and len(base64.b64decode(made["data"]["secret"])) == 64


def test_the_image_has_what_the_installation_and_the_pods_need() -> None:
    root = kubernetes.EXAMPLES.parent
    lines = (kubernetes.EXAMPLES / "kubernetes" / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert all((root / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= copied  # what pyproject.toml names for the wheel
    for kind in ("job", "trainjob"):
        pod, runs = pod_of(kind)
        script = next(word for word in runs["command"] if word.endswith(".py"))
        assert f"examples/{script}" in copied and f"WORKDIR {pod['containers'][0]['workingDir']}" in lines
        assert f"-t {pod['containers'][0]['image']} " in lines[0]
