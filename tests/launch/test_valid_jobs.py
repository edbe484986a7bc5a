"""Documents for Kubernetes, by its own schemas and by the models of the controllers that read them.

They come with packages that only the second environment has.
"""

from __future__ import annotations

from typing import Any

import pytest

from shoal.launch import jobs

pytestmark = pytest.mark.proof
JOB = jobs.Job(("run.toml", "train.steps=5"), "night", nodes=2, processes=4, gpus=4, grace_s=90)
PLAIN = jobs.Job(("run.toml",), "cpu")
VERSIONS = ("1.31", "1.34", "1.37")


def documents(job: jobs.Job, kind: str) -> list[dict[str, Any]]:
    return jobs.make_kubernetes_documents(
        job, kind=kind, image="me/shoal:1", claim="disk", token="a" * 64
    )


@pytest.mark.parametrize("job", [JOB, PLAIN], ids=["gpus", "cpu"])
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_word(version: str, job: jobs.Job) -> None:
    """The secret, the job inside of the JobSet, and the pods that a TrainJob patches."""
    validate = pytest.importorskip("kubernetes_validate").validate
    secret, jobset = documents(job, "jobset")
    _, trainjob = documents(job, "trainjob")
    (node,) = jobset["spec"]["replicatedJobs"]
    (patch,) = trainjob["spec"]["runtimePatches"]
    (inner,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = inner["template"]["spec"]["template"]["spec"]
    trainer = trainjob["spec"]["trainer"]
    (container,) = pod["containers"]
    run = {
        **container,
        "image": trainer["image"],
        "command": trainer["command"],
        "env": trainer["env"],
        "resources": trainer["resourcesPerNode"],
    }
    job_of = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "night"}}
    pod_of = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "night"}}
    for one in (
        secret,
        {**job_of, "spec": node["template"]["spec"]},
        {**pod_of, "spec": {**pod, "containers": [run]}},
    ):
        validate(one, version, strict=True)
    broken = {**job_of, "spec": {**node["template"]["spec"], "completion": 2}}
    with pytest.raises(Exception, match="completion"):
        validate(broken, version, strict=True)


@pytest.mark.parametrize("job", [JOB, PLAIN], ids=["gpus", "cpu"])
@pytest.mark.parametrize(
    ("kind", "model"),
    [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")],
)
def test_controllers_know_every_word(kind: str, model: str, job: jobs.Job) -> None:
    """What a model does not know it drops when it reads a document."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, written = documents(job, kind)
    read = getattr(models, model).from_dict(written).to_dict()
    assert dropped(written, read) == []
    assert dropped({**written, "spec": {**written["spec"], "suspended": True}}, read) == [
        "spec.suspended"
    ]


def dropped(written: Any, read: Any, place: str = "") -> list[str]:
    """Where two documents are not alike."""
    if isinstance(written, dict):
        return [
            line
            for key, value in written.items()
            for line in (
                dropped(value, read[key], f"{place}.{key}".lstrip("."))
                if isinstance(read, dict) and key in read
                else [f"{place}.{key}".lstrip(".")] * bool(value)
            )
        ]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        rows = enumerate(zip(written, read, strict=True))
        return [line for n, (a, b) in rows for line in dropped(a, b, f"{place}[{n}]")]
    return [] if written == read else [place]
