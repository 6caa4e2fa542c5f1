"""docs/deploy: the manifest against KubeRay's schema, the script against sbatch, their commands.

No Kubernetes and no SLURM: srun, scontrol and Ray are stand-ins that run what they are given.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agentloop.__main__ import main
from agentloop.config import load_settings, to_toml
from agentloop.training.cluster.placement import ClusterNode, ProcessKind
from agentloop.training.plan.cluster import ClusterPlan
from agentloop.training.plan.settings import TrainSettings
from tests.patience import patient

pytestmark = pytest.mark.timeout(120)  # a plan imports all that a run would

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
VECTORS = ROOT / "tests" / "vectors"
QWEN = ROOT / "agentloop" / "cli" / "recipes" / "qwen3-14b"
SCRIPT = DEPLOY / "train.sbatch"
GIB = 1 << 30


def accepts(arguments: list[str], *shape: str) -> None:
    """The command line of `agentloop train` is a plan's, too."""
    assert arguments[:2] == ["agentloop", "train"]
    shapes = [word for pods in shape for word in ("--shape", pods)]
    assert main([*arguments[1:], f"model='{QWEN}'", "--dry-run", *shapes]) == 0


def write_problems(path: Path) -> None:
    """Write a file in the place of the paper's problems, without which a plan says `missing`."""
    path.parent.mkdir(exist_ok=True)
    rows = ({"problem": f"{number} plus 1?", "answer": number + 1} for number in range(2000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands run: it has docs/recipes, and will have runs."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name in ("math-42k", "dapo-en"):
        write_problems(tmp_path / "data" / f"{name}.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stopped_run(folder: Path, *overrides: str) -> None:
    recipe = ROOT / "agentloop" / "cli" / "recipes" / f"{folder.name}.toml"
    folder.mkdir(parents=True)
    settings = load_settings(TrainSettings, [recipe], [f"model='{QWEN}'", *overrides])
    (folder / "config.toml").write_text(to_toml(settings))


# --- Kubernetes -----------------------------------------------------------------------------------


@cache
def manifest() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    return made


@cache
def schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((VECTORS / "rayjob.json").read_text()))


def groups() -> dict[str, dict[str, Any]]:
    cluster = manifest()["spec"]["rayClusterSpec"]
    return {
        "head": cluster["headGroupSpec"],
        **{group["groupName"]: group for group in cluster["workerGroupSpecs"]},
    }


def container(group: dict[str, Any]) -> dict[str, Any]:
    (trainer_container,) = group["template"]["spec"]["containers"]
    assert isinstance(trainer_container, dict)
    return trainer_container


def pods() -> list[ClusterNode]:
    """The pods as nodes of the Ray cluster, one of those with the trainer's resource first."""
    nodes = []
    for name in ("learner", "head", "servers", "sandboxes"):
        group, limits = groups()[name], container(groups()[name])["resources"]["limits"]
        cpus = float(group["rayStartParams"].get("num-cpus", limits["cpu"]))
        memory = int(re.fullmatch(r"(\d+)Gi", limits["memory"])[1]) * GIB  # type: ignore[index]
        gpus = int(limits.get("nvidia.com/gpu", 0))
        for number in range(group.get("replicas", 1)):
            nodes.append(ClusterNode(f"{name} {number}", cpus, gpus, memory, 80 * GIB))
    return nodes


def entrypoints() -> list[list[str]]:
    """The commands of `agentloop` in the entrypoint: of the next attempts, and of the first."""
    shell, option, script = shlex.split(manifest()["spec"]["entrypoint"])
    assert (shell, option) == ("sh", "-c")
    assert "$" not in script  # it goes through two more shells
    subprocess.run(["sh", "-n", "-c", script], check=True)
    commands = [shlex.split(command) for command in re.findall(r"exec (agentloop [^;]*);", script)]
    assert len(commands) == 2
    return commands


def test_manifest_is_what_kuberay_takes() -> None:
    schema().check_schema(schema().schema)
    assert [error.message for error in schema().iter_errors(manifest())] == []
    assert (manifest()["apiVersion"], manifest()["kind"]) == ("ray.io/v1", "RayJob")


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("spec.entryPoint", "true"),
        ("spec.backoffLimit", "three"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.volumes", {}),
        ("spec.rayClusterSpec.workerGroupSpecs.0.replica", 1),
        ("spec.rayClusterSpec.workerGroupSpecs.0.groupName", None),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.resource", {}),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.env.0.value", 1),
    ],
)
def test_schema_refuses_what_kuberay_would(path: str, wrong: Any) -> None:
    changed: Any = copy.deepcopy(manifest())
    *above, last = path.split(".")
    place = changed
    for name in above:
        place = place[int(name) if name.isdigit() else name]
    place[last] = wrong
    assert not schema().is_valid(changed)


def test_all_processes_have_a_place_on_the_pods() -> None:
    _, first = entrypoints()
    recipe, *overrides = first[2:]
    settings = load_settings(TrainSettings, [recipe], [*overrides, f"model='{QWEN}'"])
    nodes = pods()
    assert settings.cluster.nodes == len(nodes)
    made = ClusterPlan(settings, nodes, nodes[0].name).placements
    where = {
        kind: {placed.node.split()[0] for placed in made if placed.process.kind is kind}
        for kind in ProcessKind
    }
    assert where[ProcessKind.TRAINER] == where[ProcessKind.RANK] == {"learner"}
    assert where[ProcessKind.SERVER] == {"servers"}
    assert where[ProcessKind.SANDBOX] == {"sandboxes"}


def test_trainer_starts_where_the_first_ranks_are() -> None:
    wanted = json.loads(manifest()["spec"]["entrypointResources"])
    (text,) = shlex.split(groups()["learner"]["rayStartParams"]["resources"])
    assert json.loads(text) == wanted
    workers = [group for name, group in groups().items() if name != "learner"]
    assert all("resources" not in group["rayStartParams"] for group in workers)


def test_all_pods_share_the_volume() -> None:
    claim = yaml.safe_load((DEPLOY / "shared-volume.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in groups().values():
        (volume,) = group["template"]["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (mount,) = container(group)["volumeMounts"]
        assert (mount["name"], mount["mountPath"]) == (volume["name"], "/shared")
        assert container(group)["workingDir"] == "/shared"
        resources = container(group)["resources"]
        assert resources["limits"] == resources["requests"]  # Ray counts the limits


def test_entrypoint_is_accepted(workplace: Path) -> None:
    again, first = entrypoints()
    shapes = ("4x32,8x80,1000", "4x16,8x80,256", "4x36")
    accepts(first, *shapes)
    stopped_run(workplace / again[-1], "cluster.nodes=13")
    accepts(again, *shapes)


# --- SLURM ----------------------------------------------------------------------------------------

STAND_INS = {
    # Ray runs what comes after the two hyphens; symmetric-run's own options are known.
    "srun": 'exec "$@"',
    "ray": """
echo "$@" > ray.txt
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
""",
    "scontrol": """
if [ "$1" = show ]; then printf 'node-1\\nnode-2\\n'; else echo "$@" > requeued.txt; fi
""",
}
TRAINER = f"""#!{sys.executable}
import json, signal, sys
def stop(number, frame):
    raise SystemExit(143)
signal.signal(signal.SIGTERM, stop)
print(json.dumps(["agentloop", *sys.argv[1:]]), flush=True)
if "--until-signalled" in sys.argv:
    signal.pause()
"""


@pytest.fixture
def job(workplace: Path) -> dict[str, str]:
    """The environment of a job on eight nodes, whose programs are stand-ins."""
    folder = workplace / "bin"
    folder.mkdir()
    programs = {name: f"#!/bin/bash\n{text}\n" for name, text in STAND_INS.items()}
    for name, text in {**programs, "agentloop": TRAINER}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TMPDIR": str(workplace),
        "SLURM_JOB_NODELIST": "node-[1-8]",
        "SLURM_JOB_NUM_NODES": "8",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "96",
    }


def start_job(job: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments], env=job, stdout=subprocess.PIPE, text=True
    )


def command_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    words: list[str] = json.loads(process.stdout.readline())
    return words


def test_scripts_options_are_sbatchs() -> None:
    sbatch_options = set((VECTORS / "sbatch_options.txt").read_text().split("\n")[1:])
    options = re.findall(r"^#SBATCH (--[a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.M)
    assert len(options) == SCRIPT.read_text().count("\n#SBATCH")
    assert [name for name, _ in options if name not in sbatch_options] == []
    values = dict(options)
    kind, name, seconds = re.fullmatch(r"(B):(\w+)@(\d+)", values["--signal"]).groups()  # type: ignore[union-attr]
    assert kind == "B"  # Ray is not signalled, or it would end before the trainer
    assert f"trap stop {name}" in SCRIPT.read_text()
    assert int(seconds) >= 300
    assert values["--ntasks-per-node"] == "1"
    # sbatch reads no options after the first command.
    body = re.split(r"^(?!#)", SCRIPT.read_text(), maxsplit=1, flags=re.M)[1]
    assert "#SBATCH" not in body


def test_script_trains_on_all_nodes(job: dict[str, str], workplace: Path) -> None:
    with start_job(job) as process:
        command = command_of(process)
    assert process.returncode == 0
    assert command[2:] == ["paper-stage1", "cluster.address=auto", "cluster.nodes=8"]
    ray = (workplace / "ray.txt").read_text().split()
    assert ray[:5] == ["symmetric-run", "--address", "node-1:6379", "--min-nodes", "8"]
    assert not (workplace / "requeued.txt").exists()
    accepts(command, "8x96,8x80,2048")


def test_script_that_finds_its_run_continues_it(job: dict[str, str], workplace: Path) -> None:
    stopped_run(workplace / "runs" / "release-8gpu")
    with start_job(job, "release-8gpu", "loop.steps=250") as process:
        command = command_of(process)
    assert command[2:5] == ["--resume", "runs/release-8gpu", "loop.steps=250"]
    accepts(command, "1x128,8x80,1024")


def test_signal_stops_trainer_and_queues_job_again(job: dict[str, str], workplace: Path) -> None:
    with start_job(job, "paper-stage1", "--until-signalled") as process:
        command_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(patient(60)) == 143
    assert (workplace / "requeued.txt").read_text() == "requeue 7\n"


def test_run_that_fails_fails_the_job(job: dict[str, str], workplace: Path) -> None:
    (workplace / "bin" / "agentloop").write_text("#!/bin/sh\nexit 2\n")
    with start_job(job) as process:
        pass
    assert process.returncode == 2
    assert not (workplace / "requeued.txt").exists()


# --- images ---------------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    made: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return made


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_image_copies_what_is_there_and_installs_extras_that_exist(kind: str) -> None:
    text = (DEPLOY / f"Dockerfile.{kind}").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (extras,) = re.findall(r'pip install .*"\.\[([a-z,]+)\]"', text)
    assert set(extras.split(",")) <= project()["optional-dependencies"].keys()
    assert "python -m agentloop.inference.install" in text.replace("python3", "python")
    (command,) = re.findall(r"^CMD (.*)$", text, re.M)
    assert json.loads(command) == ["agentloop", "doctor"]
    used = {container(group)["image"] for group in groups().values()}
    assert f"agentloop:{kind}" in used
    assert f"-t agentloop:{kind} ." in text


def test_cuda_image_has_the_sglang_that_is_required() -> None:
    (requirement,) = project()["optional-dependencies"]["sglang"]
    version = requirement.removeprefix("sglang==")
    assert f"ARG BASE=lmsysorg/sglang:v{version}\n" in (DEPLOY / "Dockerfile.cuda").read_text()
