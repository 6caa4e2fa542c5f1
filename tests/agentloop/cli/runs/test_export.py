"""`agentloop runs export`: the choice of weights, the written files, and errors."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from agentloop.__main__ import main
from agentloop.agent.chat_format import ChatFormat
from agentloop.cli.runs.export import _cast_file, export, find
from agentloop.errors import AgentLoopError, ModelError, SettingsError
from agentloop.models import SMALL


def publish_small_model(folder: Path, version: str, *, without: tuple[str, ...] = ()) -> Path:
    """Create a folder of the small model as the learner publishes it."""
    ignore = shutil.ignore_patterns("README.md", "__pycache__", *without)
    shutil.copytree(SMALL, folder, ignore=ignore)
    sha256 = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.safetensors"))
    }
    (folder / "published.json").write_text(json.dumps({"version": version, "sha256": sha256}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a run that was stopped while it published step 10."""
    folder = tmp_path / "runs" / "first"
    for step in ("2", "9"):
        publish_small_model(folder / "weights" / step, step)
    (folder / "weights" / ".10.partial").mkdir()
    (folder / "config.toml").write_text('model = "small"\n[loop]\nsteps = 9\n')
    rows: list[dict[str, Any]] = [
        {"step": 8, "reward": 0.5},
        {"step": 9, "held_out/reward": 0.75},
        {"step": 9, "reward": 0.625, "learner/lr": 1e-6},
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 1')
    return folder


def shards(folder: Path) -> None:
    """Split the weights of `folder` into two float32 files."""
    tensors: dict[str, Any] = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            tensors[name] = np.random.default_rng(0).standard_normal(shape, np.float32)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[:5],
        "model-00002-of-00002.safetensors": names[5:],
    }
    for file_name, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file_name)
    weight_map = {name: file_name for file_name, part in parts.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_json_output_says_what_was_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "model"
    assert main(["runs", "export", str(run), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "out": str(out),
        "folder": f"{run}/weights/9",
        "run": str(run),
        "version": "9",
    }


def test_newest_weights_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "new" / "model"
    assert main(["runs", "export", str(run), str(out)]) == 0
    message = f"{out}: exported from {run}/weights/9, version 9\n"
    assert capsys.readouterr().out == message
    same = ("model.safetensors", "chat_template.jinja", "tokenizer.json", "generation_config.json")
    for name in same:
        assert (out / name).read_bytes() == (SMALL / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (out / "published.json").exists()
    assert ChatFormat.load(out).generation_prompt == ChatFormat.load(SMALL).generation_prompt
    assert list(out.parent.iterdir()) == [out]
    card = (out / "README.md").read_text()
    assert "# first\n\nTrained with agentloop; weight version 9.\n" in card
    assert "| reward | 0.625 |\n| learner/lr | 1e-06 |" in card
    assert "| held_out/reward | 0.75 |" in card
    assert "[loop]\nsteps = 9\n```" in card
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() in card


def test_older_step_and_a_folder_by_itself(run: Path, tmp_path: Path) -> None:
    assert find(run, 2).version == "2"
    with pytest.raises(ModelError, match=r"weights of step 3 \(available: 2, 9\)"):
        find(run, 3)
    assert find(run / "weights" / "2").run == run
    with pytest.raises(ModelError, match="a model folder: it has no steps"):
        find(run / "weights" / "2", 2)
    assert find(SMALL) == find(SMALL, None)
    assert (find(SMALL).run, find(SMALL).version) == (None, None)
    shutil.rmtree(run / "weights")
    with pytest.raises(ModelError, match="no published weights yet"):
        find(run)
    with pytest.raises(ModelError, match=r"neither a run's folder .* nor a model folder"):
        find(tmp_path)


def test_model_of_a_supervised_run(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    publish_small_model(folder / "model", "sft-12", without=("generation_config.json",))
    (folder / "config.toml").write_text("")
    model = export(folder, tmp_path / "out")
    assert (model.version, model.run) == ("sft-12", folder)
    generation_config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation_config == {"eos_token_id": 2, "pad_token_id": 0}
    assert "version sft-12" in (tmp_path / "out" / "README.md").read_text()


def test_somebody_elses_model_keeps_its_card(tmp_path: Path) -> None:
    export(SMALL, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == (SMALL / "README.md").read_text()


def test_weights_are_cast(tmp_path: Path) -> None:
    source = tmp_path / "source"
    publish_small_model(source, "1")
    (source / "published.json").unlink()
    shards(source)
    export(source, tmp_path / "half", dtype="bfloat16")
    export(tmp_path / "half", tmp_path / "whole", dtype="float32")
    export(tmp_path / "whole", tmp_path / "again", dtype="bfloat16")
    num_bytes = 0
    for path in sorted(source.glob("*.safetensors")):
        tensors, cast_tensors = load_file(path), load_file(tmp_path / "whole" / path.name)
        assert list(tensors) == list(cast_tensors)
        for name, tensor in tensors.items():
            assert cast_tensors[name].shape == tensor.shape
            np.testing.assert_allclose(cast_tensors[name], tensor, rtol=2**-8)
            num_bytes += tensor.nbytes // 2
        half = tmp_path / "half" / path.name
        assert half.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == num_bytes
    for name, dtype in [("half", "bfloat16"), ("whole", "float32")]:
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype


def test_bfloat16_is_rounded_to_the_nearest_and_to_even(tmp_path: Path) -> None:
    def cast(*values: float) -> list[float]:
        source, half, restored = (tmp_path / f"{name}.safetensors" for name in "abc")
        save_file({"x": np.array(values, np.float32), "n": np.arange(3)}, source)
        _cast_file(source, half, "bfloat16")
        _cast_file(half, restored, "float32")
        assert load_file(restored)["n"].tolist() == [0, 1, 2]  # integers are not cast
        return [float(value) for value in load_file(restored)["x"]]

    step = 2.0**-7
    halfway = [1 + step / 2, 1 + 3 * step / 2]
    assert cast(*halfway) == [1.0, 1 + 2 * step]
    assert cast(1 + step / 2 + 2**-20, -1 - step / 2 - 2**-20) == [1 + step, -1 - step]
    assert cast(0.0, -0.0, float("inf"), -3.0) == [0.0, -0.0, float("inf"), -3.0]
    assert cast(3.4e38) == [float("inf")]
    assert np.isnan(cast(float("nan")))


def test_weights_that_differ_from_the_published_ones_are_refused(run: Path, tmp_path: Path) -> None:
    weights = run / "weights" / "9" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=r"9/model\.safetensors: differs from the published"):
        export(run, tmp_path / "out")
    weights.unlink()
    with pytest.raises(ModelError, match=r"weights/9: model\.safetensors is missing"):
        export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_model_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = publish_small_model(tmp_path / "model", "1", without=("chat_template.jinja",))
    with pytest.raises(ModelError, match="no chat template"):
        export(folder, tmp_path / "out")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_existing_path_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.touch()
    elif kind == "folder":
        out.mkdir()
    else:
        out.symlink_to(tmp_path / "gone")
    with pytest.raises(SettingsError, match="out: already exists"):
        export(SMALL, out)


def test_failure_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = publish_small_model(tmp_path / "model", "1")
    (folder / "published.json").unlink()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for dtype in (None, "float32"):
        with pytest.raises(AgentLoopError, match="safetensors: truncated"):
            export(folder, tmp_path / "out", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    weights.write_bytes(b"\xff" * 100)
    assert main(["runs", "export", str(folder), str(tmp_path / "out")]) == 2
    assert "model.safetensors: truncated, or not a safetensors file" in capsys.readouterr().err
    assert main(["runs", "export", str(SMALL), f"{weights}/out"]) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
