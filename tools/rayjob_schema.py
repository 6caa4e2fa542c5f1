"""Trim KubeRay's definition of a RayJob to what docs/deploy is checked with.

    python -m tools.rayjob_schema ray.io_rayjobs.yaml v1.7.0

The file is `ray-operator/config/crd/bases/ray.io_rayjobs.yaml` of the release named second. Kept is
the schema of `ray.io/v1` without descriptions and status, one copy of the template of a pod, and of
that what a manifest here could want. The result is tests/vectors/rayjob.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

__all__ = ["trim"]

TARGET = Path(__file__).parents[1] / "tests" / "vectors" / "rayjob.json"
LEFT_OUT = ("affinity", "ephemeralContainers", "initContainers", "topologySpreadConstraints")
VOLUMES = ("name", "configMap", "csi", "emptyDir", "hostPath", "nfs", "persistentVolumeClaim")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def trim(definition: dict[str, Any], release: str) -> dict[str, Any]:
    """Return the schema of a RayJob, from KubeRay's CustomResourceDefinition."""
    (version,) = (
        candidate for candidate in definition["spec"]["versions"] if candidate["name"] == "v1"
    )
    schema: dict[str, Any] = _plain(version["schema"]["openAPIV3Schema"])
    del schema["properties"]["status"]
    job = schema["properties"]["spec"]["properties"]
    cluster = job["rayClusterSpec"]["properties"]
    pod = cluster["headGroupSpec"]["properties"]["template"]
    same = {"$ref": "#/$defs/pod"}
    for holder, name in (
        (job, "submitterPodTemplate"),
        (cluster["headGroupSpec"]["properties"], "template"),
        (cluster["workerGroupSpecs"]["items"]["properties"], "template"),
    ):
        if holder[name] != pod:
            raise ValueError(f"{name} differs from the head's template")
        holder[name] = same
    properties = pod["properties"]["spec"]["properties"]
    volume = properties["volumes"]["items"]["properties"]
    container = properties["containers"]["items"]["properties"]
    for holder, names in (
        (properties, LEFT_OUT),
        (volume, volume.keys() - set(VOLUMES)),
        (container, PROBES),
    ):
        for name in list(names):
            del holder[name]
    comment = (
        f"From KubeRay {release}, ray-operator/config/crd/bases/ray.io_rayjobs.yaml "
        "(github.com/ray-project/kuberay, Apache License 2.0), trimmed by tools/rayjob_schema.py."
    )
    return {"$comment": comment, **_refuse_unknown(schema), "$defs": {"pod": _refuse_unknown(pod)}}


def _plain(schema: Any) -> Any:
    """Leave out descriptions, and use JSON Schema's word for Kubernetes' integer or string."""
    if isinstance(schema, list):
        return [_plain(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: _plain(value)
        for name, value in schema.items()
        if not (name == "description" and isinstance(value, str))
        and not name.startswith("x-kubernetes")
    }
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]} | {k: v for k, v in kept.items() if k != "anyOf"}
    return kept


def _refuse_unknown(schema: Any) -> Any:
    """Refuse unknown fields, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [_refuse_unknown(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _refuse_unknown(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def main(path: str, release: str) -> None:
    made = trim(yaml.safe_load(Path(path).read_text()), release)
    TARGET.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
