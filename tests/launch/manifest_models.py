"""Holds what `shoal launch kubernetes` writes against the published schemas and models.

    PYTHON_WITH_THEM manifest_models.py     prints what was held against what; asserts

Kubernetes' own parts by the JSON schemas of three versions, strictly (no unknown field); JobSet and
TrainJob by the models that their projects publish: what such a model does not know it drops, so it
must give back what it was given.
"""

from __future__ import annotations

import importlib
from typing import Any

from shoal.launch import jobs

VERSIONS = ("1.31", "1.34", "1.37")


def main() -> None:
    """Hold every kind, with and without GPUs."""
    validate = importlib.import_module("kubernetes_validate").validate
    models: Any = importlib.import_module("kubeflow_trainer_api.models")
    for kind, model in (
        ("jobset", models.JobsetV1alpha2JobSet),
        ("trainjob", models.TrainerV1alpha1TrainJob),
    ):
        for gpus in (0, 8):
            asked = jobs.Job(("run.toml",), "shoal", 2, gpus or 2, gpus)
            secret, job = jobs.kubernetes(
                asked, kind=kind, image="shoal:1", claim="runs", token="of-this-run"
            )
            for version in VERSIONS:
                validate(secret, version, strict=True)
                for part in job["spec"].get("replicatedJobs", []):
                    inner = {"spec": part["template"]["spec"], "metadata": {"name": "shoal"}}
                    validate(
                        {"apiVersion": "batch/v1", "kind": "Job", **inner}, version, strict=True
                    )
            assert model.from_dict(job).to_dict() == job
            print(f"{kind}, {gpus} GPUs: valid for Kubernetes {', '.join(VERSIONS)}")


if __name__ == "__main__":
    main()
