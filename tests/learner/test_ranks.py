"""Real ranks: DeepSpeed's ZeRO 1, 2 and 3 with one and two processes, against plain PyTorch.

Ranks are started once per kind; each test first loads the initial checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import patient

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch
from safetensors.numpy import load as load_arrays
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from agentloop.learner.batch import Batch
from agentloop.learner.utilization import Work
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import (
    LearnerSettings,
    LossSettings,
    OptimizerSettings,
)
from tests.learner.plain import Plain, load, scores
from tests.learner.ranks import ROOT, SIZES, Ranks, make_batch, make_siblings, started

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SETTINGS = LearnerSettings(
    model=SMALL,
    micro_batch_tokens=57,
    head_chunk_tokens=16,
    publish_dtype="float32",
    max_shard_mib=1,
    collective_timeout_s=60,
    # With AdamW's default of 1e-8, rounding errors of gradients near 0 would become updates.
    optimizer=OptimizerSettings(lr=1e-3, warmup_steps=0, eps=1e-5),
    # The small model's tensors are so small that ZeRO 3 would not partition them.
    deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
)
KINDS = [(stage, num_ranks) for num_ranks in (1, 2) for stage in (1, 2, 3)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"zero{kind[0]}x{kind[1]}")
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Ranks, Path]]:
    stage, num_ranks = request.param
    folder = tmp_path_factory.mktemp("ranks")
    settings = SETTINGS.model_copy(update={"zero_stage": stage})
    with started(folder, settings, num_ranks) as ranks:
        assert ranks.ask("save", folder=folder / "begin" / "0")["ok"]
        yield stage, ranks, folder


def from_the_beginning(kind: tuple[int, Ranks, Path]) -> Ranks:
    _, ranks, folder = kind
    assert ranks.ask("load", folder=folder / "begin" / "0")["num_updates"] == 0
    return ranks


def published(ranks: Ranks, folder: Path) -> dict[str, Any]:
    assert ranks.ask("publish", folder=folder, version="1")["ok"]
    shards = sorted(folder.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def policy_batch(batch: Batch) -> Batch:
    """Return the batch with log-probabilities near the model's own, so that ratios are near 1."""
    model, rng = load(SETTINGS), np.random.default_rng(0)
    old = np.zeros(len(batch.ids), np.float32)
    with torch.no_grad():
        for index in range(len(batch.lengths)):
            new, _, place = scores(model, batch, index)
            old[place] = new.numpy()
    noise = rng.normal(0, 0.3, (2, len(old))).astype(np.float32)
    return replace(batch, old_logprobs=old + noise[0], logprobs=old + noise[1])


@pytest.mark.parametrize(
    "samples",
    [make_batch(), make_batch(sizes=(20, 25, 31, 12, 8, 17)), make_siblings()],
    ids=["single", "packed", "siblings"],
)
@pytest.mark.gate
def test_four_steps_are_those_of_plain_pytorch(
    kind: tuple[int, Ranks, Path], samples: Batch
) -> None:
    """Each sample is in a micro-batch of its own, several are packed into one, or share tokens."""
    stage, ranks, folder = kind[0], from_the_beginning(kind), kind[2]
    plain, batch = Plain(SETTINGS), policy_batch(samples)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    batch.save(folder / "batch")
    for _ in range(4):
        expected, result = plain.step(batch), ranks.ask("step", batch=folder / "batch")
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-4)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert result["clipped"] == pytest.approx(expected["clipped"], abs=0.02)
        assert 0.1 < result["clipped"] < 1, "the batch does not exercise the clip"
    weights = published(ranks, folder / "four")
    assert weights.keys() == before.keys(), "without the tied head"
    current = dict(plain.model.named_parameters())
    moved = max((current[name] - before[name]).abs().max().item() for name in current)
    differ = max((current[name] - weights[name]).abs().max().item() for name in current)
    print(f"zero{stage}: largest update {moved:.2e}, difference {differ:.2e}")
    assert moved > 2e-3
    assert differ < 5e-6


def test_advantage_of_each_token_counts(kind: tuple[int, Ranks, Path]) -> None:
    """Loss and gradient are those of plain PyTorch, and change with the advantage of any token."""
    ranks, folder = from_the_beginning(kind), kind[2]
    batch, rng = policy_batch(make_batch()), np.random.default_rng(1)
    advantages = rng.normal(size=len(batch.ids)).astype(np.float32) * batch.mask
    batch = replace(batch, advantages=advantages)
    single = advantages.copy()
    single[np.flatnonzero(batch.mask)[7]] += 3
    result, expected = [], []
    for number, another in enumerate((batch, replace(batch, advantages=single))):
        another.save(folder / f"tokens-{number}")
        from_the_beginning(kind)
        result.append(ranks.ask("step", batch=folder / f"tokens-{number}"))
        expected.append(Plain(SETTINGS).step(another))
        assert result[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=1e-4)
        assert result[-1]["grad_norm"] == pytest.approx(expected[-1]["grad_norm"], rel=1e-3)
    assert abs(expected[0]["loss"] - expected[1]["loss"]) > 2e-3


def test_new_optimizer_remembers_nothing(kind: tuple[int, Ranks, Path]) -> None:
    ranks, folder = from_the_beginning(kind), kind[2]
    plain, batch = Plain(SETTINGS), policy_batch(make_batch())
    batch.save(folder / "batch")
    for _ in range(2):
        plain.begin_anew()
        assert ranks.ask("reset_optimizer")["ok"]
        for _ in range(2):
            plain.step(batch)
            ranks.ask("step", batch=folder / "batch")
    weights = published(ranks, folder / "anew")
    current = dict(plain.model.named_parameters())
    # Adam's first step after a reset is as large for a gradient that is nearly 0, where two ranks'
    # sums differ from one's in the last bits; an optimizer that remembers is off by far more.
    assert max((current[name] - weights[name]).abs().max().item() for name in current) < 2e-5


def test_log_probabilities_and_entropies_are_the_models(kind: tuple[int, Ranks, Path]) -> None:
    ranks, folder, batch = from_the_beginning(kind), kind[2], make_batch(3)
    batch.save(folder / "batch")
    assert ranks.ask("logprobs", batch=folder / "batch", out=folder / "out")["ok"]
    result = load_arrays((folder / "out").read_bytes())
    model = load(SETTINGS)
    expected = {name: np.zeros(len(batch.ids), np.float32) for name in ("logprobs", "entropies")}
    with torch.no_grad():
        for index in range(len(batch.lengths)):
            logprobs, entropies, place = scores(model, batch, index)
            expected["logprobs"][place], expected["entropies"][place] = logprobs, entropies
    assert result.keys() == expected.keys()
    assert expected["entropies"].max() > 0.1
    for name, wanted in expected.items():
        np.testing.assert_allclose(result[name], wanted * batch.mask, atol=2e-4)


@pytest.mark.gate
def test_training_goes_on_from_a_checkpoint_bit_by_bit(kind: tuple[int, Ranks, Path]) -> None:
    ranks, folder = from_the_beginning(kind), kind[2]
    make_batch(1).save(folder / "one")
    make_batch(2).save(folder / "two")
    assert ranks.ask("step", batch=folder / "one")["num_updates"] == 1
    state = {"step": 3, "version": 2, "lineage": "x"}
    assert ranks.ask("save", folder=folder / "save" / "a", state=state)["ok"]
    first = ranks.ask("step", batch=folder / "two")
    weights = ranks.ask("publish", folder=folder / "first", version="2")["sha256"]
    loaded = ranks.ask("load", folder=folder / "save" / "a")
    assert (loaded["state"], loaded["num_updates"]) == (state, 1)
    again = ranks.ask("step", batch=folder / "two")
    assert (again["loss"], again["grad_norm"]) == (first["loss"], first["grad_norm"])
    assert ranks.ask("publish", folder=folder / "again", version="2")["sha256"] == weights
    kept = json.loads((folder / "save" / "a" / "state.json").read_text())
    assert kept["state"] == state


def test_step_without_a_finite_gradient_is_skipped(kind: tuple[int, Ranks, Path]) -> None:
    """Only one sample is bad, so with two ranks one of them sees nothing of it."""
    ranks, folder = from_the_beginning(kind), kind[2]
    make_batch(advantages=np.asarray([3e38, 1, -1, 1], np.float32)).save(folder / "bad")
    make_batch().save(folder / "good")
    before = ranks.ask("publish", folder=folder / "before", version="1")["sha256"]
    for num_skipped in (1, 2):
        result = ranks.ask("step", batch=folder / "bad")
        assert (result["ok"], result["skipped"], result["grad_norm"]) == (True, 1, None)
        assert (result["num_updates"], result["num_skipped"]) == (0, num_skipped)
    assert ranks.ask("publish", folder=folder / "after", version="1")["sha256"] == before
    result = ranks.ask("step", batch=folder / "good")
    assert (result["skipped"], result["num_updates"]) == (0, 1)
    assert ranks.ask("publish", folder=folder / "moved", version="1")["sha256"] != before
    assert ranks.ask("step", batch=folder / "bad")["ok"], "a good step ends the row of bad ones"


def test_sample_that_is_too_long_is_left_out_and_counted(kind: tuple[int, Ranks, Path]) -> None:
    """The step equals that of the other samples, also if one of them is from the same group."""
    ranks, folder = from_the_beginning(kind), kind[2]
    make_batch(sizes=(40, 60, 33)).save(folder / "long")
    complete = make_batch(sizes=(40, 60, 33))
    kept = np.r_[0:40, 100:133]
    names = ("ids", "mask", "logprobs", "advantages", "weights")
    per_token = {name: getattr(complete, name)[kept] for name in names}
    per_sample = {"lengths": np.asarray([40, 33], np.int32), "groups": complete.groups[[0, 2]]}
    replace(complete, **per_token, **per_sample).save(folder / "others")
    result = ranks.ask("step", batch=folder / "long")
    assert (result["num_too_long"], result["num_samples"], result["num_updates"]) == (1, 2, 1)
    weights = ranks.ask("publish", folder=folder / "without", version="1")["sha256"]
    from_the_beginning(kind)
    expected = ranks.ask("step", batch=folder / "others")
    assert (expected["num_too_long"], expected["loss"]) == (0, result["loss"])
    assert ranks.ask("publish", folder=folder / "expected", version="1")["sha256"] == weights
    make_batch(sizes=(60, 58)).save(folder / "all")
    result = ranks.ask("step", batch=folder / "all")
    assert (result["num_too_long"], result["num_samples"], result["loss"]) == (2, 0, None)
    assert ranks.ask("publish", folder=folder / "nothing", version="1")["sha256"] == weights


def test_batch_may_have_fewer_samples_than_there_are_ranks(kind: tuple[int, Ranks, Path]) -> None:
    ranks, folder = from_the_beginning(kind), kind[2]
    make_batch(sizes=(30,)).save(folder / "lonely")
    result = ranks.ask("step", batch=folder / "lonely")
    assert result["ok"]
    assert result["ratio"] == pytest.approx(1)
    assert np.isfinite(result["grad_norm"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, Path]]:
    """Two ranks that compute in bfloat16, as on an accelerator."""
    folder = tmp_path_factory.mktemp("two")
    optimizer = OptimizerSettings(lr=1e-3, warmup_steps=4)
    more: dict[str, Any] = {"dtype": "bfloat16", "publish_dtype": "bfloat16", "max_shard_mib": 4096}
    more |= {"optimizer": optimizer, "updates_per_batch": 2, "keep_checkpoints": 2}
    more |= {"activation_checkpointing": True, "peak_tflops": 0.01}
    with started(folder, SETTINGS.model_copy(update=more), 2) as ranks:
        yield ranks, folder


def test_published_weights_are_a_model_folder(two: tuple[Ranks, Path]) -> None:
    """Before any step, the published weights are those that training started from."""
    ranks, folder = two
    result = ranks.ask("publish", folder=folder / "7", version="7")
    manifest = json.loads((folder / "7" / "published.json").read_text())
    written = hashlib.sha256((folder / "7" / "model.safetensors").read_bytes()).hexdigest()
    assert manifest == {"version": "7", "sha256": {"model.safetensors": written}, "base": {}}
    assert {name: result[name] for name in ("version", "sha256")}.items() <= manifest.items()
    ours, theirs = (
        load_file(folder / "7" / "model.safetensors"),
        load_file(SMALL / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / "7" / file).read_bytes() == (SMALL / file).read_bytes()
    assert json.loads((folder / "7" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (folder / "7" / "README.md").exists(), "the model card describes other weights"
    model = Qwen3ForCausalLM.from_pretrained(folder / "7", dtype="auto")
    assert torch.equal(model.lm_head.weight, ours["model.embed_tokens.weight"])
    assert [single.name for single in folder.glob(".*")] == [], "nothing half written is left"


def test_two_updates_of_a_batch_and_the_warm_up(two: tuple[Ranks, Path]) -> None:
    ranks, folder = two
    make_batch().save(folder / "batch")
    first = ranks.ask("step", batch=folder / "batch")
    assert (first["num_updates"], first["lr"]) == (2, pytest.approx(5e-4))
    assert first["ratio"] != 1, "the second update starts where the first one ended"
    second = ranks.ask("step", batch=folder / "batch", lr=3e-4)
    assert (second["num_updates"], second["lr"]) == (4, 3e-4)
    names = {"loss", "clipped", "ratio", "mismatch_kl", "entropy", "grad_norm", "tokens_per_s"}
    assert names | {"num_tokens", "lr"} <= second.keys()
    whole_s = 150 / second["tokens_per_s"]
    parts = [f"{name}_s" for name in ("old_logprobs", "forward", "backward", "optimizer")]
    assert all(second[name] > 0 for name in parts)
    assert sum(second[name] for name in parts) <= whole_s
    work = Work.of(load(SETTINGS))
    assert work is not None
    num_operations = work.of_batch(SIZES, second["num_tokens"])
    assert second["mfu"] == pytest.approx(num_operations / (2 * 1e10 * whole_s))
    assert "peak_memory_gib" not in second, "it needs an accelerator"


def test_old_checkpoints_are_removed(two: tuple[Ranks, Path]) -> None:
    ranks, folder = two
    (folder / "kept" / "mine").mkdir(parents=True)
    for name in ("a", "b", "c", "c"):
        assert ranks.ask("save", folder=folder / "kept" / name)["ok"]
    assert {single.name for single in (folder / "kept").iterdir()} == {"mine", "b", "c"}


def test_request_that_cannot_be_carried_out_is_refused(two: tuple[Ranks, Path]) -> None:
    ranks, folder = two
    make_batch(sizes=(30, 65)).save(folder / "long")
    make_batch(ids=np.full(150, 512, np.int32)).save(folder / "foreign")
    make_batch().save(folder / "batch")
    (folder / "file").write_text("in the way")
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("step", {"batch": folder / "nope"}, "nope: No such file"),
        ("logprobs", {"batch": folder / "long", "out": folder / "out"}, "sample 1 has 65 tokens"),
        ("step", {"batch": folder / "foreign"}, "512 is out of range, the vocabulary has 512"),
        ("step", {"batch": folder / "batch", "lr": "fast"}, "lr: Input should be a valid number"),
        ("step", {"batch": folder / "batch", "rescue": 3}, "rescue: Input should be a valid"),
        ("load", {"folder": folder / "nope"}, "nope: not a checkpoint"),
        ("save", {"folder": folder / "a", "state": 3}, "state: Input should be"),
        ("save", {"folder": folder / "a", "beside": 1}, "beside: Input should be a valid bool"),
        ("publish", {"folder": folder / "file" / "7", "version": "7"}, "file"),
        ("publish", {"folder": folder / "7"}, "version: Field required"),
        ("dance", {}, "unknown op 'dance'"),
    ]
    for op, fields, message in requests:
        answer = ranks.ask(op, **fields)
        assert (answer["ok"], answer["fatal"]) == (False, False)
        assert message in answer["error"]
    assert ranks.ask("step", batch=folder / "batch")["ok"]


def test_full_disk_refuses_the_request(two: tuple[Ranks, Path]) -> None:
    """Either rank's disk may be full; here a file grows beyond the system's limit."""
    ranks, folder = two
    make_batch().save(folder / "batch")
    for full, op in ((0, "publish"), (0, "save"), (1, "save")):
        target = folder / "full" / op
        fields = {"version": "7"} if op == "publish" else {}
        pid = ranks.processes[full].pid
        usual = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, usual[1]))
        answer = ranks.ask(op, folder=target, **fields)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, usual)
        assert (answer["ok"], answer["fatal"]) == (False, False)
        assert f"{target}: " in answer["error"]
        assert "File too large" in answer["error"]
        assert list((folder / "full").iterdir()) == [], "the partial folder is removed"
        assert ranks.ask("step", batch=folder / "batch")["ok"], "the learner goes on"
        assert ranks.ask(op, folder=folder / "whole" / op, **fields)["ok"]


def test_ranks_end_when_their_supervisor_hangs_up(tmp_path: Path) -> None:
    with started(tmp_path, SETTINGS, 2) as ranks:
        ranks.hang_up()
        assert [process.wait(patient(100)) for process in ranks.processes] == [0, 0]


def test_loss_against_the_engine_and_the_initial_weights(tmp_path: Path) -> None:
    make_batch().save(tmp_path / "without")
    make_batch(ref_logprobs=make_batch().logprobs).save(tmp_path / "batch")
    loss = LossSettings(old_logprobs_from="engine", kl_coef=0.1)
    with started(tmp_path, SETTINGS.model_copy(update={"loss": loss}), 2) as ranks:
        assert ranks.ready["num_ranks"] == 2
        result = ranks.ask("step", batch=tmp_path / "without")
        assert result["kl"] == pytest.approx(0, abs=1e-6), "to its own initial weights"
        result = ranks.ask("step", batch=tmp_path / "batch")
        assert (result["tis"], result["num_updates"]) == (1, 2), (
            "the ratio to the engine leaves no importance weight"
        )
        assert result["ratio"] != pytest.approx(1, abs=0.01)
        assert result["kl"] > 0
        assert ranks.ask("close") == {"ok": True}
        assert [process.wait(patient(100)) for process in ranks.processes] == [0, 0]


def test_three_bad_steps_end_the_learner(tmp_path: Path) -> None:
    """The state is saved first, and others resume from it as if the bad steps had not happened."""
    make_batch().save(tmp_path / "good")
    make_batch(advantages=np.asarray([3e38, 1, -1, 1], np.float32)).save(tmp_path / "bad")
    rescue = {"rescue": tmp_path / "saved" / "rescue", "state": {"step": 7}}
    with started(tmp_path, SETTINGS, 2) as ranks:
        assert ranks.ask("step", batch=tmp_path / "good")["ok"]
        weights = ranks.ask("publish", folder=tmp_path / "one", version="1")["sha256"]
        for _ in range(2):
            assert ranks.ask("step", batch=tmp_path / "bad", **rescue)["ok"]
        assert not (tmp_path / "saved").exists()
        answer = ranks.ask("step", batch=tmp_path / "bad", **rescue)
        assert (answer["ok"], answer["fatal"], answer["on_purpose"]) == (False, True, True)
        assert "3 steps in a row had no finite gradient" in answer["error"]
        assert f"saved in {tmp_path}/saved/rescue" in answer["error"]
        assert all(process.wait(patient(100)) != 0 for process in ranks.processes)
    with started(tmp_path, SETTINGS, 2) as ranks:
        loaded = ranks.ask("load", folder=tmp_path / "saved" / "rescue")
        assert (loaded["num_updates"], loaded["num_skipped"]) == (1, 3)
        assert loaded["state"]["step"] == 7
        assert ranks.ask("publish", folder=tmp_path / "again", version="1")["sha256"] == weights
        assert ranks.ask("step", batch=tmp_path / "good")["num_updates"] == 2


@pytest.mark.gate
def test_half_a_step_is_never_saved(tmp_path: Path) -> None:
    """The first of a batch's four updates is applied, the others fail.

    Resuming from the previous checkpoint repeats the step as if nothing had happened.
    """
    settings = SETTINGS.model_copy(update={"updates_per_batch": 4})
    sizes = (20,) * 8
    make_batch(1, sizes).save(tmp_path / "good")
    advantages = np.asarray([1, -1] + [3e38] * 6, np.float32)
    make_batch(2, sizes, advantages=advantages).save(tmp_path / "half")
    rescue = {"rescue": tmp_path / "saved" / "rescue", "state": {"step": 1}}
    with started(tmp_path / "first", settings, 1) as ranks:
        assert ranks.ask("save", folder=tmp_path / "saved" / "0", state={"step": 0})["ok"]
        assert ranks.ask("step", batch=tmp_path / "good")["num_updates"] == 4
        weights = ranks.ask("publish", folder=tmp_path / "one", version="1")["sha256"]
        answer = ranks.ask("step", batch=tmp_path / "half", **rescue)
        assert (answer["ok"], answer["fatal"], answer["on_purpose"]) == (False, True, True)
        assert "nothing is saved, because 1 of the batch's updates were applied" in answer["error"]
        assert [single.name for single in (tmp_path / "saved").iterdir()] == ["0"]
    with started(tmp_path / "second", settings, 1) as ranks:
        assert ranks.ask("load", folder=tmp_path / "saved" / "0")["state"]["step"] == 0
        assert ranks.ask("step", batch=tmp_path / "good")["num_updates"] == 4
        assert ranks.ask("publish", folder=tmp_path / "again", version="1")["sha256"] == weights


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_that_dies_or_hangs_ends_the_others(tmp_path: Path, how: signal.Signals) -> None:
    """The others notice even while there are no requests."""
    # The timeout also has to cover the time between the ranks' starts.
    settings = SETTINGS.model_copy(update={"collective_timeout_s": 20})
    with started(tmp_path, settings, 2) as ranks:
        ranks.processes[1].send_signal(how)
        answer = ranks.answer()
        assert (answer["ok"], answer["fatal"], answer["on_purpose"]) == (False, True, False)
        assert ranks.processes[0].wait(patient(100)) != 0


def test_rank_dies_with_its_supervisor() -> None:
    child = "import time, learner.__main__ as m; m._die_with_parent(); print(1); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"1\n"
        supervisor.kill()
        assert supervisor.stdout.read() == b"", (
            "the pipe closes with the last process that holds it"
        )


def test_invalid_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"model": "x", "zero_stage": 4}')
    done = subprocess.run(
        [sys.executable, "-m", "agentloop.learner", str(tmp_path / "settings.json")],
        capture_output=True, text=True, timeout=patient(60), check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "zero_stage" in done.stderr
