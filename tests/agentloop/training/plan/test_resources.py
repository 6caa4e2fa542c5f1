"""The plan of a run, compared with values computed by hand and with the small model."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentloop.cli.resource_report import report
from agentloop.config import load_settings
from agentloop.errors import ModelError, SettingsError
from agentloop.models import SMALL
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings, LoraSettings
from agentloop.training.plan.resources import (
    _BYTES_PER_TRAJECTORY_TOKEN,
    Machine,
    ModelShape,
    Plan,
    learner_memory,
    plan,
    this_machine,
)
from agentloop.training.plan.settings import TrainSettings
from agentloop.trajectory import Trajectory, Turn, VersionSpan

QWEN3_14B = Path(__file__).parents[4] / "agentloop" / "cli" / "recipes" / "qwen3-14b"
BIG = Machine(ram_bytes=2 << 40, disk_free_bytes=100 << 40, num_gpus=8, gpu_bytes=80 << 30)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "0")


# The size of the paper's steps.
PAPER = (
    *("loop.steps=510", "loop.prompts_per_step=512", "loop.group_size=32"),
    *("roc.down_sample_to_n=16", "budget.max_response_tokens=8192"),
)


def plan_for(*overrides: str, machine: Machine = BIG) -> Plan:
    return plan(load_settings(TrainSettings, overrides=[*PAPER, *overrides]), machine)


def write_config(folder: Path, **changes: Any) -> Path:
    """Create a folder with a small configuration, without weights."""
    config = json.loads((SMALL / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


# Parameters.


def test_small_models_parameters_are_those_in_its_weights(tmp_path: Path) -> None:
    counted, computed = ModelShape.read(SMALL), ModelShape.read(write_config(tmp_path))
    assert counted.counted
    assert not computed.counted
    assert dataclasses.replace(computed, counted=True) == counted
    # 512 x 128 + 4 x (128 x (128 + 64 + 64 + 128) + 3 x 128 x 384 + 2 x 128 + 2 x 32) + 128
    assert counted.num_parameters == 853_376


def test_qwen3_14b_has_as_many_as_its_weights() -> None:
    shape = ModelShape.read(QWEN3_14B)
    assert shape.num_parameters == 14_768_307_200  # as published with it
    assert (shape.query_size, shape.kv_size, shape.num_layers) == (5120, 1024, 40)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"model_type": "llama"}, -4 * 2 * 32),  # no norms of queries and keys
        ({"model_type": "qwen2"}, -4 * 2 * 32 + 4 * (128 + 2 * 64)),  # but biases
        ({"model_type": "llama", "attention_bias": True}, -4 * 64 + 4 * (128 + 2 * 64 + 128)),
        ({"tie_word_embeddings": False}, 512 * 128),
        ({"num_key_value_heads": None}, 4 * 2 * 128 * 64),
        ({"head_dim": None}, 0),
    ],
)
def test_other_configurations(tmp_path: Path, changes: dict[str, Any], more: int) -> None:
    shape = ModelShape.read(write_config(tmp_path, **changes))
    assert shape.num_parameters == 853_376 + more


def test_parameters_that_cannot_be_counted_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="of a 'qwen3_moe' can only be counted in its weights"):
        ModelShape.read(write_config(tmp_path, model_type="qwen3_moe"))
    shutil.copy(SMALL / "model.safetensors", tmp_path)
    assert ModelShape.read(tmp_path).num_parameters == 853_376
    with pytest.raises(ModelError, match="'hidden_size' is missing"):
        ModelShape.read(write_config(tmp_path, hidden_size=None))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: "):
        ModelShape.read(tmp_path)
    with pytest.raises(SettingsError, match=r"has no config\.json.*no weights"):
        plan_for(f"model='{tmp_path}/gone'")


# Memory of the learner.


@pytest.mark.parametrize(
    ("stage", "dtype", "num_ranks", "states"),
    [
        # of a parameter: weights, gradients, optimizer
        (1, "bfloat16", 4, (2, 4, 3)),
        (2, "bfloat16", 4, (2, 1, 3)),
        (3, "bfloat16", 4, (0.5, 1, 3)),
        (1, "float32", 1, (4, 4, 12)),
        (2, "float32", 2, (4, 2, 6)),
        (3, "float32", 2, (2, 2, 6)),
    ],
)
def test_ranks_share_weights_gradients_and_optimizer_by_the_stage(
    stage: Any, dtype: Any, num_ranks: int, states: tuple[float, ...]
) -> None:
    shape = dataclasses.replace(ModelShape.read(SMALL), num_parameters=1_000_000)
    settings = LearnerSettings(zero_stage=stage, dtype=dtype)
    memory = learner_memory(shape, settings, RanksSettings(nproc_per_node=num_ranks), on_gpus=False)
    sizes = (memory.weights, memory.gradients, memory.optimizer)
    assert sizes == tuple(1_000_000 * per for per in states)
    assert memory.loading == num_ranks * (4 if dtype == "float32" else 2) * 1_000_000
    assert memory.offloaded == 0
    settings = settings.model_copy(update={"offload": "optimizer"})
    memory = learner_memory(shape, settings, RanksSettings(nproc_per_node=num_ranks), on_gpus=False)
    assert memory.optimizer == 0
    assert memory.gradients == (1_000_000 * states[1] if stage == 1 else 0)
    assert memory.offloaded == 1_000_000 * (states[2] + 4 / num_ranks)


def test_lora_trains_few() -> None:
    shape = ModelShape.read(SMALL)
    lora = LoraSettings(rank=8)
    memory = learner_memory(shape, LearnerSettings(lora=lora), RanksSettings(), on_gpus=False)
    # 4 x 8 x (q 256, k 192, v 192, o 256, gate, up and down 512 each)
    assert memory.optimizer == 12 * 77_824
    assert memory.gradients == 4 * 77_824
    assert memory.weights == 4 * 853_376
    lora = LoraSettings(rank=8, targets=("q_proj", "v_proj"))
    memory = learner_memory(shape, LearnerSettings(lora=lora), RanksSettings(), on_gpus=False)
    assert memory.optimizer == 12 * 4 * 8 * (256 + 192)
    made = plan_for("learner.lora.rank=8")
    assert made.disk.checkpoint == (4 + 12) * 77_824
    assert "77,824 trained parameters" in report(made)


def test_ranks_on_several_nodes_share_out_more() -> None:
    shape = dataclasses.replace(ModelShape.read(SMALL), num_parameters=1_000_000)
    ranks = RanksSettings(nproc_per_node=2, nodes=4)
    memory = learner_memory(shape, LearnerSettings(), ranks, on_gpus=False)
    assert (memory.weights, memory.optimizer) == (4_000_000, 12 * 1_000_000 // 8)
    assert memory.loading == 2 * 4_000_000
    made = plan_for("ranks.nproc_per_node=2", "ranks.nodes=4", "cluster.address=auto")
    assert "2 ranks on each of 4 nodes" in report(made)


def test_buffers_activations_and_logits() -> None:
    shape = ModelShape.read(QWEN3_14B)
    learner = LearnerSettings(dtype="bfloat16", micro_batch_tokens=10_000, head_chunk_tokens=1000)
    memory = learner_memory(shape, learner, RanksSettings(nproc_per_node=8), on_gpus=True)
    assert memory.buffers == 2 * 500_000_000
    # 2 x (6 x 5120 + 5 x 5120 + 4 x 1024 + 4 x 17408) + 4 x 5120 + 2 x 5120 + 2 x 1024
    assert memory.activations == 10_000 * 40 * 292_864
    assert memory.logits == 1000 * 151_936 * 18
    parts = [memory.weights, memory.gradients, memory.optimizer, memory.buffers]
    assert memory.total == sum(parts) + memory.activations + memory.logits
    update = {"activation_checkpointing": True, "zero_stage": 3}
    ranks = RanksSettings(nproc_per_node=8)
    memory = learner_memory(shape, learner.model_copy(update=update), ranks, on_gpus=True)
    assert memory.activations == 10_000 * (40 * 2 * 5120 + 292_864)
    assert memory.buffers == 2 * 500_000_000 + 2 * 1_000_000_000


# Servers, disk, tokens.


@pytest.mark.parametrize(
    ("tp_size", "kv_token"),
    [(1, 163_840), (2, 81_920), (8, 20_480), (16, 20_480)],  # 2 x 40 layers x heads x 128 x 2
)
def test_memory_of_a_server(tp_size: int, kv_token: int) -> None:
    overrides = (f"model='{QWEN3_14B}'", "server.device=cuda", f"server.tp_size={tp_size}")
    server = plan_for(*overrides, "server.max_total_tokens=100000").server
    assert server.weights == 2 * 14_768_307_200 // tp_size
    assert server.kv_token == kv_token
    assert server.rollout == 8192 * kv_token
    assert server.kv_cache == 100_000 * kv_token
    assert plan_for("server.tp_size=1").server.kv_token == 2 * 4 * 64 * 4  # float32 on a CPU
    assert plan_for("server.tp_size=1").server.kv_cache is None


def test_tokens_and_disk() -> None:
    overrides = ("loop.steps=300", "loop.checkpoint_every=50", "learner.dtype=bfloat16")
    made = plan_for(f"model='{QWEN3_14B}'", *overrides)
    assert made.num_rollouts == 512 * 32
    assert made.max_tokens == 512 * 32 * 8192
    assert (made.num_kept, made.max_kept_tokens) == (512 * 16, 512 * 16 * 8192)
    assert made.disk.weights == 2 * 14_768_307_200
    assert made.disk.checkpoint == 14 * 14_768_307_200
    assert made.disk.checkpoints == 4 * made.disk.checkpoint  # three kept, one being written
    assert made.disk.trajectories_per_step == 512 * 32 * 8192 * 30
    assert made.disk.trajectories == 300 * made.disk.trajectories_per_step
    sharded = plan_for("loop.steps=300", "learner.zero_stage=3").disk
    assert sharded.checkpoint == 12 * 853_376
    rare = plan_for("loop.steps=300", "loop.checkpoint_every=0").disk
    assert rare.checkpoints == rare.checkpoint
    every = plan_for("loop.steps=300", "learner.keep_checkpoints=0", "loop.checkpoint_every=7").disk
    assert every.checkpoints == 43 * every.checkpoint
    assert plan_for("roc.down_sample_to_n=0").num_kept == 512 * 32
    assert plan_for("loop.group_size=8").num_kept == 512 * 8
    cut = plan_for("sampling.top_k=20", "sampling.top_p=0.9")
    assert cut.disk.kept_ids_per_step == 512 * 32 * 8192 * 20 * 2
    assert cut.disk.trajectories_per_step == 512 * 32 * 8192 * 70
    assert "5.0 GiB  of these per step, if each token keeps all 20 (sampling.top_k)" in report(cut)
    assert "sampling.top_k" not in report(plan_for())


def test_experts_take_disk_if_they_are_replayed(tmp_path: Path) -> None:
    model = f"model='{write_config(tmp_path, num_experts_per_tok=2)}'"
    replayed = plan_for(model, "learner.routing_replay=true")
    assert replayed.disk.experts_per_step == 512 * 32 * 8192 * 4 * 2 * 4 // 3
    assert "1.3 GiB  of these per step (routing_replay)" in report(replayed)
    assert "routing_replay" not in report(plan_for(model))


def test_bytes_of_a_trajectorys_token() -> None:
    """Ids of five digits and log-probabilities with all digits are typical of a large model."""
    num = 1000
    turn = Turn(
        [10_000 + i for i in range(num)],
        logprobs=[-1 / (3 + i) for i in range(num)],
        versions=[VersionSpan("12", 0, num)],
        text="abcd" * num,
    )
    row = orjson.dumps(Trajectory("a", [1], [turn]).to_dict(), default=str)
    assert len(row) / num == pytest.approx(_BYTES_PER_TRAJECTORY_TOKEN, rel=0.2)


def test_gpus_are_shared_by_servers_and_ranks() -> None:
    overrides = (
        "server.device=cuda",
        "server.count=2",
        "server.tp_size=2",
        "ranks.nproc_per_node=3",
    )
    assert plan_for(*overrides).num_gpus == 4
    assert plan_for(*overrides).num_processes == 5
    with_external_servers = plan_for(*overrides, "servers=['http://node-1:30000']")
    assert (with_external_servers.num_gpus, with_external_servers.num_processes) == (3, 3)
    assert plan_for("ranks.nproc_per_node=3").num_gpus == 0


# What is said.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["budget.max_response_tokens=4096"], "context of 4,096 tokens cannot hold a prompt and"),
        (["server.max_total_tokens=8000"], r"max_total_tokens \(8,000\) cannot hold one rollout"),
        (["loop.steps=2"], "the warm-up of 2 steps lasts the whole run"),
        (["server.device=cuda", "ranks.nproc_per_node=9"], "9 GPUs needed; this machine has 8"),
        (["server.device=cuda"], "servers and ranks share GPUs, and a server takes most"),
        ([f"model='{QWEN3_14B}'", "server.device=cuda"], r"a rank takes [\d.,]+ GiB of its GPU's"),
        (
            [
                *(f"model='{QWEN3_14B}'", "server.device=cuda", "learner.dtype=bfloat16"),
                *("ranks.nproc_per_node=8", "learner.zero_stage=3"),
                *("learner.activation_checkpointing=true", "learner.micro_batch_tokens=16384"),
                "server.extra_args=['--mem-fraction-static', '0.5']",
                "loop.max_staleness=1",
            ],
            r"a rank takes 47\.1 GiB of its GPU's 80\.0 GiB, and servers 40\.0 GiB",
        ),
        (
            [
                *(f"model='{QWEN3_14B}'", "server.device=cuda", "learner.dtype=bfloat16"),
                *("ranks.nproc_per_node=8", "learner.zero_stage=3"),
                "learner.activation_checkpointing=true",
                "server.extra_args=['--mem-fraction-static', '0.6']",
            ],
            r"between two steps a rank keeps .* of its GPU's 80\.0 GiB, and servers take 48\.0 GiB",
        ),
        (
            [
                *(f"model='{QWEN3_14B}'", "server.device=cuda"),
                "server.extra_args=['--mem-fraction-static=0.2']",
            ],
            "weights take 27.5 GiB of each GPU: raise server.tp_size",
        ),
        (
            [f"model='{QWEN3_14B}'", "ranks.nproc_per_node=64"],
            "of host memory; this machine has 2.0 TiB",
        ),
        (["loop.steps=400000"], r"up to [\d,.]+ TiB will be written to runs, .* only 100 TiB"),
    ],
)  # fmt: skip
def test_warnings(overrides: list[str], message: str) -> None:
    usual = ["budget.max_response_tokens=1000"] if overrides[0].startswith("loop") else []
    run_plan = plan_for(*usual, *overrides)
    [line] = [line for line in report(run_plan).splitlines() if re.search(message, line)]
    assert line.startswith("warning    ")


def test_shared_gpu_holds_the_larger_of_two_alternating_phases() -> None:
    shared = (
        *("server.device=cuda", "budget.max_response_tokens=1000"),
        "server.extra_args=['--mem-fraction-static', '0.5']",
    )
    run_plan = plan_for(*shared)
    memory, server = run_plan.learner, run_plan.machine.gpu_bytes // 2
    lasting = memory.weights + memory.gradients + memory.optimizer + memory.buffers
    assert run_plan.phases == (lasting + server, memory.total)
    assert "servers give their memory back in each step" in report(run_plan)
    for change in ("loop.max_staleness=1", "weights.transport=broadcast", "loop.learn=false"):
        pair = plan_for(*shared, change)
        assert pair.phases == (memory.total + server,) * 2, change
        assert "servers keep their memory while the learner works" in report(pair)
    external = plan_for(*shared, "servers=['http://node-1:30000']")
    assert not external.shares_gpus
    assert "shared with the ranks" not in report(external)


def test_run_that_fits_has_no_warnings() -> None:
    fits = (
        *("loop.steps=100", "budget.max_response_tokens=512", "loop.prompts_per_step=8"),
        *("server.device=cuda", "server.extra_args=['--mem-fraction-static', '0.4']"),
    )
    assert plan_for(*fits).warnings == ()
    assert plan_for(*fits[:3]).warnings == ()


def test_defaults_suit_the_model_that_ships_with_agentloop() -> None:
    assert plan(load_settings(TrainSettings), BIG).warnings == ()


def test_plan_says_what_a_step_does() -> None:
    run_plan = plan_for(
        *(f"model='{QWEN3_14B}'", "server.device=cuda", "servers=['http://a:1']"),
        "learner.micro_batch_tokens=16384",
    )
    text = report(run_plan)
    for line in (
        "14.77 billion parameters (from the configuration)",
        "40 layers of 5120, vocabulary 151,936, context 32,768",
        "roll out 512 tasks, 32 times each: 16,384 rollouts of at most 8,192 tokens and 10 turns",
        "134.2 million tokens in total",
        "on at most 8,192 of them, 67.11 million tokens: at least 4,096 micro-batches per rank",
        "27.5 GiB of weights for 1 external server",
        "160 KiB  per token, 1.2 GiB per rollout",
    ):
        assert line in text


def test_pass_on_a_gpu_has_room_for_a_rollout_at_least() -> None:
    on_gpu = (f"model='{QWEN3_14B}'", "server.device=cuda", "servers=['http://a:1']")
    measured, fixed = plan_for(*on_gpu), plan_for(*on_gpu, "learner.micro_batch_tokens=8192")
    assert measured.learner == fixed.learner
    text = report(measured)
    assert "8,192 tokens, not checkpointed; more at once where there is room" in text
    assert "67.11 million tokens: 1 optimizer step" in text
    assert plan_for().pass_tokens == 16_384, "on a CPU"


def test_this_machine(tmp_path: Path) -> None:
    machine = this_machine(tmp_path / "not" / "there")
    assert machine.ram_bytes > 256 << 20
    assert machine.disk_free_bytes > 0
    assert bool(machine.num_gpus) == bool(machine.gpu_bytes)
    made = plan(load_settings(TrainSettings, overrides=[f"run.folder='{tmp_path}'"]))
    assert f"disk       {tmp_path}: up to" in report(made)
