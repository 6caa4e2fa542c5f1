"""Estimate what a training run will need: tokens, memory, disk space, processes.

    config.json (weights need not exist) + settings ──> Plan ──> text (resource_report.py)

P is the number of parameters, T that of trained parameters (P, or a LoRA's), R the number of ranks,
w the bytes of `learner.dtype`. With DeepSpeed 0.19's ZeRO stages, each rank holds:

                 1            2            3
    weights      w P          w P          w P / R
    gradients    4 T          4 T / R      4 T / R
    optimizer    12 T / R     12 T / R     12 T / R
    checkpoint   (w + 12) T   (w + 12) T   12 T          all ranks together, on disk

and in stage 3 also the gathered parameters, w min(P, stage3_max_live_parameters). The optimizer
holds float32 weights and AdamW's two moments. When offloaded, these and the rank's share of the
gradients are in the host's memory. With `learner.loss.kl_coef`, and without LoRA, there is a frozen
copy of the weights: w P / R on each device in stage 3, otherwise w P in the host's memory. Buffers
are the gradient reduction bucket and the gathered parameters. Activations are the tensors that
autograd saves in Qwen3's layers, per token: w (6 H + 5 Q + 4 K + 4 I), and in bfloat16 another
4 H + 2 Q + 2 K for norms in float32, where H, Q, K, I are the widths of a layer, its queries, its
keys and its MLP; with activation checkpointing, w H per layer plus one whole layer. Logits are
`head_chunk_tokens` rows, four times in float32 and once in w.

On GPUs that servers and ranks share and take turns on, servers give their memory back in each step:
a GPU has to hold the larger of (a rank without activations and logits, and a server) and (a whole
rank). Otherwise it holds both at once.

Not covered: memory of torch, CUDA and NCCL themselves (a few GiB per GPU); fragmentation; gradients
of activations; ZeRO's copy of a rank's gradients during the optimizer step, when activations are
freed; CUDA graphs and activations of servers (and the 2 GiB of a server on a CPU); weights and
activations of adapters. Upper bounds assume rollouts that use up their budget: prompts come on top,
and most rollouts are shorter.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentloop.errors import ModelError, SettingsError
from agentloop.launch.units import number, size
from agentloop.models import SMALL, not_a_model
from agentloop.models.folder import read_json
from agentloop.plain_json import JsonObject
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import RlLearnerSettings, TrainingSettings
from agentloop.training.plan.settings import TrainSettings, lends_memory, serves_on_gpus
from agentloop.training.run.status import count_of

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
_COUNTABLE = ("llama", "mistral", "qwen2", "qwen3")
_BYTES_PER_TRAJECTORY_TOKEN = 30  # in trajectories/*.jsonl
_BYTES_PER_KEPT_ID = 2  # there, compressed


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of a machine. `gpu_bytes` is the memory of the smallest GPU; 0: unknown."""

    ram_bytes: int
    disk_free_bytes: int
    num_gpus: int = 0
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a dense decoder, from its configuration.

    Attributes:
        counted: whether parameters were counted in the weights rather than computed from the
            configuration.
        query_size, kv_size: total width of all query heads, and of all key (or value) heads.
        num_routed: experts that a token is sent to, in all layers; 0: the model has none.
    """

    num_parameters: int
    counted: bool
    dtype: str
    num_layers: int
    hidden_size: int
    query_size: int
    kv_size: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int
    context_length: int
    num_routed: int = 0

    @classmethod
    def read(cls, folder: Path, changes: Mapping[str, object] | None = None) -> ModelShape:
        """Read the shape of the model in a folder.

        Parameters are counted in the weights if they exist and there are no `changes` to the
        configuration.

        Raises:
            ModelError: the configuration is missing values or of an unsupported kind.
        """
        config = read_json(folder / "config.json") | dict(changes or {})
        try:
            heads = config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // heads
            kv_heads = config.get("num_key_value_heads") or heads
            tied = bool(config.get("tie_word_embeddings"))
            counted = 0 if changes else _count_tensors(folder, tied=tied)
            return cls(
                num_parameters=counted or _count(config, heads * head_dim, kv_heads * head_dim),
                counted=bool(counted),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
                num_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                query_size=heads * head_dim,
                kv_size=kv_heads * head_dim,
                num_kv_heads=kv_heads,
                mlp_size=config["intermediate_size"],
                vocab_size=config["vocab_size"],
                context_length=config.get("max_position_embeddings") or 0,
                num_routed=config["num_hidden_layers"] * config.get("num_experts_per_tok", 0),
            )
        except KeyError as error:
            raise ModelError(
                f"{folder}/config.json: {error} is missing: cannot plan for this kind of model"
            ) from None


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """The memory of a rank, in bytes.

    Fields are on its device, except `offloaded`, on the host, and `loading`, on the host while all
    ranks of a machine load the model, each of them completely.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    logits: int
    offloaded: int
    loading: int

    @property
    def lasting(self) -> int:
        """Bytes on the device that it also takes between two steps."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.lasting + self.activations + self.logits


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory of a server on each of its GPUs, or in the host's memory on a CPU, in bytes.

    Attributes:
        kv_token: one token in the KV cache.
        rollout: a rollout that uses up its budget, without its prompt.
        kv_cache: the whole KV cache; None: as much as fits.
    """

    weights: int
    kv_token: int
    rollout: int
    kv_cache: int | None


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk space of a run's folder, in bytes: upper bounds.

    Published weights count twice, since they are replaced atomically, and checkpoints include one
    that is being written. `kept_ids_per_step` and `experts_per_step` are parts of the trajectories.
    """

    weights: int
    checkpoint: int
    checkpoints: int
    trajectories_per_step: int
    kept_ids_per_step: int
    experts_per_step: int
    trajectories: int

    @property
    def total(self) -> int:
        return 2 * self.weights + self.checkpoints + self.trajectories


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimated requirements of a run.

    Attributes:
        pass_tokens: tokens of a forward pass; where a GPU's memory decides, those of one rollout.
    """

    settings: TrainSettings
    machine: Machine
    folder: Path
    shape: ModelShape
    on_gpus: bool
    pass_tokens: int
    learner: LearnerMemory
    server: ServerMemory
    disk: Disk

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the run may fail, as far as the estimates tell."""
        return tuple(_warnings(self))

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts per step."""
        return self.settings.loop.prompts_per_step * self.settings.loop.group_size

    @property
    def num_kept(self) -> int:
        """Largest number of rollouts per step that are trained on."""
        size, target = self.settings.loop.group_size, self.settings.roc.down_sample_to_n
        return self.settings.loop.prompts_per_step * (min(size, target) if target > 0 else size)

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens in a step's rollouts, without prompts."""
        return self.num_rollouts * self.settings.budget.max_response_tokens

    @property
    def max_kept_tokens(self) -> int:
        return self.num_kept * self.settings.budget.max_response_tokens

    @property
    def num_processes(self) -> int:
        """Number of servers and ranks. A server counts as one process."""
        s = self.settings
        num_servers = 0 if s.servers else s.server.count
        return num_servers + s.ranks.nproc_per_node * (s.ranks.nodes if s.cluster.address else 1)

    @property
    def shares_gpus(self) -> bool:
        """True if servers and ranks are on the same GPUs."""
        s = self.settings
        has_servers = self.on_gpus and _server_gpus(s) > 0
        return has_servers and (s.cluster.colocated or not s.cluster.address)

    @property
    def phases(self) -> tuple[int, int]:
        """Bytes on a GPU that servers and ranks share: during rollouts, and during a step.

        Servers that take turns with the learner (`lends_memory`) have none during a step.
        """
        taken = int((_mem_fraction(self.settings) or 0) * self.machine.gpu_bytes)
        if lends_memory(self.settings):
            return self.learner.lasting + taken, self.learner.total
        return (self.learner.total + taken,) * 2

    @property
    def num_gpus(self) -> int:
        """GPUs used on this machine, where servers and ranks share them, or on the cluster."""
        s = self.settings
        if not self.on_gpus:
            return 0
        num_ranks = s.ranks.nproc_per_node * (s.ranks.nodes if s.cluster.address else 1)
        return (max if self.shares_gpus else sum)((_server_gpus(s), num_ranks))

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain data: bytes, tokens and counts."""
        names = ("num_rollouts", "num_kept", "max_tokens", "max_kept_tokens")
        return {
            "model": {"folder": str(self.folder), **asdict(self.shape)},
            "steps": self.settings.loop.steps,
            "step": {name: getattr(self, name) for name in names},
            "num_processes": self.num_processes,
            "num_gpus": self.num_gpus,
            "phase_bytes": dict(zip(("rollouts", "step"), self.phases, strict=True))
            if self.shares_gpus
            else None,
            "rank_bytes": {**asdict(self.learner), "total": self.learner.total},
            "server_bytes": asdict(self.server),
            "disk_bytes": {**asdict(self.disk), "total": self.disk.total},
            "warnings": list(self.warnings),
        }


def plan(
    settings: TrainSettings,
    machine: Machine | None = None,
    *,
    changes: Mapping[str, object] | None = None,
) -> Plan:
    """Estimate what a run needs. Blocks for some tenths of a second.

    Args:
        machine: the machine to compare with; None: this one, queried with nvidia-smi.
        changes: values that differ from those in the model's config.json.

    Raises:
        SettingsError: the model's folder has no config.json.
        ModelError: as in `ModelShape.read`.
    """
    folder = Path(settings.model or SMALL).expanduser()
    if not (folder / "config.json").is_file():
        raise SettingsError(
            f"model: {not_a_model(folder)}. (A plan only needs the configuration, no weights.)"
        )
    machine = machine or this_machine(settings.run.folder)
    shape = ModelShape.read(folder, changes)
    on_gpus, learner = serves_on_gpus(settings), settings.learner
    if learner.micro_batch_tokens is None and on_gpus:
        tokens = settings.budget.max_response_tokens
        learner = learner.model_copy(update={"micro_batch_tokens": tokens})
    return Plan(
        settings=settings,
        machine=machine,
        folder=folder,
        shape=shape,
        on_gpus=on_gpus,
        pass_tokens=learner.max_sample_tokens,
        learner=learner_memory(shape, learner, settings.ranks, on_gpus),
        server=_server_memory(shape, settings, on_gpus),
        disk=_disk(shape, settings),
    )


def this_machine(folder: Path = Path()) -> Machine:
    """Return this machine's memory, NVIDIA GPUs and free disk space at `folder`."""
    place = folder.expanduser().absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        sizes = [int(line) << 20 for line in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        sizes = []  # there is no GPU, or its size is unknown
    return Machine(ram, free, len(sizes), min(sizes, default=0))


def _count(config: JsonObject, query: int, kv: int) -> int:
    """Count the parameters of a dense decoder with gated MLPs; tied embeddings count once."""
    kind = config.get("model_type")
    if kind not in _COUNTABLE:
        raise ModelError(
            f"config.json: the parameters of a {kind!r} can only be counted in its weights; the "
            f"configuration suffices for {', '.join(_COUNTABLE)}"
        )
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    layer = 2 * hidden * (query + kv) + 3 * hidden * mlp + 2 * hidden
    if kind == "qwen3":
        layer += 2 * (config.get("head_dim") or hidden // config["num_attention_heads"])
    if kind == "qwen2" or config.get("attention_bias"):
        layer += query + 2 * kv
    if kind != "qwen2" and config.get("attention_bias"):
        layer += hidden
    if config.get("mlp_bias"):
        layer += 2 * mlp + hidden
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(config["num_hidden_layers"] * layer + embeddings + hidden)


def _count_tensors(folder: Path, *, tied: bool) -> int:
    """Count the elements of all tensors in a folder's safetensors files."""
    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    counts[name] = math.prod(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ModelError(f"{path}: truncated, or not a safetensors file: {error}") from error
    if tied:
        counts.pop("lm_head.weight", None)
    return sum(counts.values())


def num_trained(shape: ModelShape, learner: TrainingSettings) -> int:
    """Count the trained parameters: all, or a LoRA's rank x (in + out) per adapted layer."""
    if not learner.lora.rank:
        return shape.num_parameters
    h, q, kv, mlp = shape.hidden_size, shape.query_size, shape.kv_size, shape.mlp_size
    widths = {
        "self_attn.q_proj": h + q,
        "self_attn.k_proj": h + kv,
        "self_attn.v_proj": h + kv,
        "self_attn.o_proj": q + h,
        "mlp.gate_proj": h + mlp,
        "mlp.up_proj": h + mlp,
        "mlp.down_proj": mlp + h,
    }
    targets = learner.lora.targets or tuple(widths)
    chosen = (width for name, width in widths.items() if name.endswith(targets))
    return shape.num_layers * learner.lora.rank * sum(chosen)


def learner_memory(
    shape: ModelShape, learner: TrainingSettings, ranks: RanksSettings, on_gpus: bool
) -> LearnerMemory:
    """Estimate the memory of a rank."""
    p, t, w = shape.num_parameters, num_trained(shape, learner), _WIDTHS[learner.dtype]
    num_ranks = ranks.nproc_per_node * ranks.nodes
    zero, stage = learner.deepspeed.get("zero_optimization", {}), learner.zero_stage
    share = math.ceil(t / num_ranks)
    weights = w * (math.ceil(p / num_ranks) if stage == 3 else p)
    has_copy = _has_frozen_copy(learner)
    weights += weights if has_copy and stage == 3 else 0
    gradients = 4 * (t if stage == 1 else share)
    optimizer = 12 * share
    # On a GPU the buffer is allocated whole; on a CPU only pages written to count.
    bucket = int(zero.get("reduce_bucket_size", 5e8))
    buffers = w * (bucket if on_gpus else min(bucket, t))
    if stage == 3:
        buffers += w * min(p, int(zero.get("stage3_max_live_parameters", 1e9)))
    offloaded = w * p if has_copy and stage < 3 else 0
    if "optimizer" in learner.offload:
        offloaded += optimizer + 4 * share
        optimizer, gradients = 0, 4 * t if stage == 1 else 0
    if "parameters" in learner.offload:
        offloaded += weights
        weights = 0
    tokens = learner.max_sample_tokens
    layer = _saved_of_layer(shape, learner.dtype)
    activations = tokens * layer * shape.num_layers
    if learner.activation_checkpointing:
        activations = tokens * (w * shape.hidden_size * shape.num_layers + layer)
    return LearnerMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        buffers=buffers,
        activations=activations,
        logits=min(learner.head_chunk_tokens, tokens) * shape.vocab_size * (16 + w),
        offloaded=offloaded,
        loading=ranks.nproc_per_node * w * p,
    )


def _has_frozen_copy(learner: TrainingSettings) -> bool:
    """Return whether the reference of the KL term takes memory."""
    has_kl = isinstance(learner, RlLearnerSettings) and learner.loss.kl_coef > 0
    return has_kl and not learner.lora.rank


def _saved_of_layer(shape: ModelShape, dtype: str) -> int:
    """Return the bytes per token that autograd saves in a Qwen3 layer (verified in
    tests/learner)."""
    hidden, query, kv = shape.hidden_size, shape.query_size, shape.kv_size
    numbers = 6 * hidden + 5 * query + 4 * kv + 4 * shape.mlp_size
    if dtype == "float32":
        return 4 * numbers
    return 2 * numbers + 4 * hidden + 2 * query + 2 * kv


def _server_memory(shape: ModelShape, settings: TrainSettings, on_gpus: bool) -> ServerMemory:
    server = settings.server
    usual = shape.dtype if on_gpus else "float32"
    w = _WIDTHS.get(server.dtype or usual, 2)
    # KV heads are never split: with more GPUs than KV heads they are replicated.
    kv_share = shape.kv_size // shape.num_kv_heads * math.ceil(shape.num_kv_heads / server.tp_size)
    kv_token = 2 * shape.num_layers * kv_share * w
    size = server.max_total_tokens
    return ServerMemory(
        weights=math.ceil(shape.num_parameters * w / server.tp_size),
        kv_token=kv_token,
        rollout=kv_token * settings.budget.max_response_tokens,
        kv_cache=None if size is None else kv_token * size,
    )


def _disk(shape: ModelShape, settings: TrainSettings) -> Disk:
    loop, learner = settings.loop, settings.learner
    weights = 0 if learner.zero_stage == 3 else _WIDTHS[learner.dtype]
    checkpoint = (weights + 12) * num_trained(shape, learner)
    every = loop.checkpoint_every or max(1, loop.steps)
    num_checkpoints = math.ceil(loop.steps / every)
    if learner.keep_checkpoints:
        num_checkpoints = min(num_checkpoints, learner.keep_checkpoints + 1)
    tokens = loop.prompts_per_step * loop.group_size * settings.budget.max_response_tokens
    kept_ids = tokens * max(0, settings.sampling.top_k) * _BYTES_PER_KEPT_ID
    experts = tokens * shape.num_routed * 4 // 3 if learner.routing_replay else 0  # in base64
    per_step = tokens * _BYTES_PER_TRAJECTORY_TOKEN + kept_ids + experts
    return Disk(
        weights=_WIDTHS[learner.publish_dtype] * shape.num_parameters,
        checkpoint=checkpoint,
        checkpoints=num_checkpoints * checkpoint,
        trajectories_per_step=per_step,
        kept_ids_per_step=kept_ids,
        experts_per_step=experts,
        trajectories=loop.steps * per_step,
    )


def _server_gpus(settings: TrainSettings) -> int:
    server = settings.server
    return 0 if settings.servers else server.count * server.tp_size * server.dp_size


def _mem_fraction(settings: TrainSettings) -> float | None:
    """Return the fraction of a GPU's memory set for servers (SGLang: --mem-fraction-static)."""
    words = [word for argument in settings.server.extra_args for word in argument.split("=", 1)]
    for name, value in pairwise(words):
        if name == "--mem-fraction-static":
            return float(value)
    return None


def _warnings(p: Plan) -> Iterator[str]:
    s, machine, learner, server = p.settings, p.machine, p.learner, p.server
    longest = s.budget.max_response_tokens
    if 0 < p.shape.context_length <= longest:
        yield (
            f"the model's context of {number(p.shape.context_length)} tokens cannot hold a prompt "
            f"and budget.max_response_tokens ({number(longest)})"
        )
    cache = s.server.max_total_tokens
    if cache is not None and not s.servers and cache <= longest:
        yield f"server.max_total_tokens ({number(cache)}) cannot hold one rollout"
    if s.learner.optimizer.warmup_steps >= s.loop.steps * s.learner.updates_per_batch > 0:
        warmup = count_of(s.learner.optimizer.warmup_steps, "step")
        yield f"the warm-up of {warmup} lasts the whole run"
    host = max(learner.loading, s.ranks.nproc_per_node * learner.offloaded)
    if p.on_gpus:
        yield from _gpu_warnings(p)
    else:
        num_local_servers = 0 if s.servers else s.server.count * s.server.dp_size
        servers = num_local_servers * (server.weights + (server.kv_cache or 0))
        host = max(host, s.ranks.nproc_per_node * learner.total + servers)
    if host > machine.ram_bytes:
        yield f"needs {size(host)} of host memory; this machine has {size(machine.ram_bytes)}"
    if p.disk.total > machine.disk_free_bytes:
        yield (
            f"up to {size(p.disk.total)} will be written to {s.run.folder}, which has only "
            f"{size(machine.disk_free_bytes)} of free space"
        )


def _gpu_warnings(p: Plan) -> Iterator[str]:
    s, machine, learner, server = p.settings, p.machine, p.learner, p.server
    server_gpus = _server_gpus(s)
    needed = max(server_gpus, s.ranks.nproc_per_node)
    if needed > machine.num_gpus:
        available = machine.num_gpus or "none that nvidia-smi lists"
        yield f"{count_of(needed, 'GPU')} needed; this machine has {available}"
    fraction, gpu_bytes = _mem_fraction(s), machine.gpu_bytes
    if p.shares_gpus and fraction is None:
        yield (
            "servers and ranks share GPUs, and a server takes most of their memory: limit it with "
            'server.extra_args = ["--mem-fraction-static", "0.4"]'
        )
    if not gpu_bytes:
        return
    if server_gpus and server.weights > (fraction or 1) * gpu_bytes:
        yield f"a server's weights take {size(server.weights)} of each GPU: raise server.tp_size"
    rollouts, step = p.phases if p.shares_gpus else (0, learner.total)
    if step > gpu_bytes:
        taken = step - learner.total
        share = f", and servers {size(taken)}" if taken else ""
        yield (
            f"a rank takes {size(learner.total)} of its GPU's {size(gpu_bytes)}{share}: "
            "use more ranks, a higher learner.zero_stage, fewer micro_batch_tokens or checkpointing"
        )
    elif rollouts > gpu_bytes:
        yield (
            f"between two steps a rank keeps {size(learner.lasting)} of its GPU's "
            f"{size(gpu_bytes)}, and servers take {size(rollouts - learner.lasting)}: lower "
            "--mem-fraction-static in server.extra_args, or use more ranks"
        )
