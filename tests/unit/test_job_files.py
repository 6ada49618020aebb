"""Files of jobs: those that the documents show, and what ``submit`` makes of its templates."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ringreduce.cli.submit import command

FILES = Path(__file__).parents[2] / "docs" / "clusters"


def printed(*words: str) -> str:
    """Return what ``ringreduce submit`` prints."""
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def documents(text: str) -> list[Any]:
    """Return the documents of a text in YAML."""
    return list(pytest.importorskip("yaml").safe_load_all(text))


@pytest.mark.parametrize("path", sorted(FILES.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_read_by_bash(path: Path) -> None:
    """Each is a program of its own."""
    subprocess.run(["bash", "-n", path], check=True, timeout=20)


def test_the_files_that_are_shown_are_templates_filled_in() -> None:
    """With their numbers."""
    asked = ("--cores-per-rank", "2", "python", "train.py")
    assert printed("slurm", *asked) == (FILES / "slurm-run.sh").read_text()
    options = ("--requeue", "--elastic", "--grace", "20", "--max-restarts", "3")
    elastic = printed("slurm", *asked[:2], *options, *asked[2:])
    assert elastic == (FILES / "slurm-elastic.sh").read_text()
    image = ("--image", "registry.example.org/train:1")
    assert printed("k8s", *image, "python", "train.py") == (FILES / "mpijob.yaml").read_text()


def test_a_job_of_slurm_has_what_was_asked_for() -> None:
    """Words of the program are quoted as a shell needs it."""
    asked = ("--name", "big", "--nodes", "3", "--ranks-per-node", "5", "--cores-per-rank", "7", "--time", "100:02:03")
    lines = printed("slurm", *asked, "-x", "A=b c", "python", "train.py", "--name", "$x").splitlines()
    values = dict(line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH"))
    assert values == {
        "job-name": "big", "nodes": "3", "ntasks-per-node": "5", "cpus-per-task": "7", "time": "100:02:03"
    }  # fmt: skip
    assert lines[-1] == "ringreduce run -x 'A=b c' python train.py --name '$x'"


def test_a_job_of_kubernetes_has_what_was_asked_for() -> None:
    """In the fields of an MPIJob."""
    asked = ("--name", "big", "--nodes", "3", "--ranks-per-node", "5", "--cores-per-rank", "7", "--time", "00:02:03")
    (job,) = documents(printed("k8s", *asked, "--image", "a.b/c@sha256:0", "python", "a b.py", '"\\1'))
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("kubeflow.org/v2beta1", "MPIJob", {"name": "big"})
    spec = job["spec"]
    assert (spec["slotsPerWorker"], spec["runPolicy"]["activeDeadlineSeconds"]) == (5, 123)
    launcher, worker = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
    assert (launcher["replicas"], worker["replicas"]) == (1, 3)
    (starts,) = launcher["template"]["spec"]["containers"]
    (works,) = worker["template"]["spec"]["containers"]
    assert starts["args"] == ["ringreduce", "run", "python", "a b.py", '"\\1']
    assert starts["env"] == [{"name": "OMP_NUM_THREADS", "value": "7"}]
    assert starts["image"] == works["image"] == "a.b/c@sha256:0"
    assert [works["resources"][each]["cpu"] for each in ("requests", "limits")] == ["35", "35"]


def test_a_trainjob_has_the_fields_of_a_runtime_for_mpi() -> None:
    """Its launcher waits for the workers; the job uses the runtime of the same file.

    Trainer mounts keys and hosts in containers that are called node alone, and gives their files modes that ssh takes
    from a user who is not root, by the group of the pods.
    """
    runtime, job = documents((FILES / "trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert set(runtime["spec"]["mlPolicy"]) == {"numNodes", "mpi"}
    known = {"numProcPerNode", "mpiImplementation", "sshAuthMountPath", "runLauncherAsNode"}
    assert set(runtime["spec"]["mlPolicy"]["mpi"]) == known
    workers, launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert launcher["dependsOn"] == [{"name": workers["name"], "status": "Ready"}]
    assert runtime["spec"]["template"]["spec"]["successPolicy"]["targetReplicatedJobs"] == [launcher["name"]]
    assert (workers["name"], launcher["name"]) == ("node", "launcher")
    # By this label Trainer finds the containers that get the image, command, args and env of a TrainJob.
    assert launcher["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert "metadata" not in workers["template"]
    assert runtime["spec"]["mlPolicy"]["mpi"]["sshAuthMountPath"] == "/home/mpiuser/.ssh"
    for job in (workers, launcher):
        pod = job["template"]["spec"]["template"]["spec"]
        assert pod["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
        assert [each["name"] for each in pod["containers"]] == ["node"]


def parts_of(text: str) -> list[dict[str, Any]]:
    """Return what Kubernetes itself makes of the jobs in a text, as documents of its own kinds."""
    found: list[dict[str, Any]] = []
    for document in documents(text):
        spec, name = document["spec"], {"name": document["metadata"]["name"]}
        if document["kind"] == "MPIJob":
            templates = (each["template"] for each in spec["mpiReplicaSpecs"].values())
            found += [
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": name, "template": each} for each in templates
            ]
        if document["kind"] == "TrainingRuntime":
            jobs = spec["template"]["spec"]["replicatedJobs"]
            found += [{"apiVersion": "batch/v1", "kind": "Job", "metadata": name, **each["template"]} for each in jobs]
    return found


@pytest.mark.parametrize("name", ["mpijob.yaml", "trainjob.yaml", "submit"])
def test_pods_are_as_kubernetes_wants_them(name: str) -> None:
    """By its own schemas: no field is unknown, none has another type; one that does not exist is found."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    options = ("--image", "a.b/c:1", "--cores-per-rank", "3", "--elastic", "--max-np", "8")
    asked = ("k8s", *options, "python", "a b.py", "-n")
    text = printed(*asked) if name == "submit" else (FILES / name).read_text()
    assert len(parts_of(text)) == 2
    for part in parts_of(text):
        kubernetes.validate(part, kubernetes.latest_version(), strict=True)
    for wrong, right in (("imag:", "image:"), ("args: sshd #", "args:")):
        for part in parts_of(text.replace(right, wrong)):
            with pytest.raises(kubernetes.ValidationError):
                kubernetes.validate(part, kubernetes.latest_version(), strict=True)


def fields_of(value: Any, path: str = "") -> set[str]:
    """Return the paths of all fields of a document."""
    if isinstance(value, dict):
        return {path}.union(*(fields_of(each, f"{path}.{key}") for key, each in value.items()))
    if isinstance(value, list):
        return {path}.union(*(fields_of(each, f"{path}[{at}]") for at, each in enumerate(value)))
    return {path}


def test_trainer_knows_all_fields_of_its_files() -> None:
    """By its own models, which drop fields that they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for document in documents((FILES / "trainjob.yaml").read_text()):
        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        assert fields_of(model.from_dict(document).to_dict()) == fields_of(document)
        wrong = {**document, "spec": {**document["spec"], "unknown": 1}}
        assert fields_of(model.from_dict(wrong).to_dict()) < fields_of(wrong)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("slurm", "--foo", "train.py"), "there is no option --foo"),
        (("slurm", "--nodse", "2", "train.py"), "there is no option --nodse; did you mean --nodes?"),
        (("slurm", "--elastc", "train.py"), "there is no option --elastc; did you mean --elastic?"),
        (("slurm", "-H", "a:2", "train.py"), "leave out -H and --hostfile"),
        (("slurm", "--time", "1h", "train.py"), "give hours, minutes and seconds"),
        (("slurm", "--min-np", "x", "train.py"), "--min-np"),
        (("slurm", "--time", "00:09:59", "--elastic", "train.py"), "give it --time 00:10:00 or more"),
        (("k8s", "train.py"), "--image"),
        (("k8s", "--image", "a\nb", "train.py"), "no name of an image"),
        (("slurm", "--name", "a b", "train.py"), "lower-case letters"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_submitted(words: tuple[str, ...], complaint: str) -> None:
    """Also what `ringreduce run` would refuse in the job."""
    done = CliRunner().invoke(command, [words[0], "--yes", *words[1:]])
    assert done.exit_code == 2
    assert complaint in done.output


def test_submit_gives_the_file_to_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the standard input of its command, whose status is that of submit; a command that is not here is named."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(command, ["slurm", "--yes", "train.py"])
    assert "there is no sbatch here" in str(done.exception)
    for program, arguments, asked in (
        ("sbatch", "", ("slurm",)),
        ("kubectl", "create -f -", ("k8s", "--image", "a.b/c:1", "--nodes", "3")),
    ):
        taken = tmp_path / "taken"
        stub = tmp_path / program
        stub.write_text(
            f'#!/bin/sh\n[ "$*" = "{arguments}" ] || exit 1\n'
            f"while IFS= read -r line; do printf '%s\\n' \"$line\"; done >{taken}\nexit 3\n"
        )
        stub.chmod(0o755)
        done = CliRunner().invoke(command, [*asked, "--yes", "train.py"], standalone_mode=False)
        assert done.return_value == 3
        assert taken.read_text() == printed(*asked, "train.py")
