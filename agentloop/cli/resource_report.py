"""The text of a `Plan`, as `agentloop train --dry-run` prints it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from agentloop.launch.units import amount, number, size
from agentloop.training.plan.resources import Plan, num_trained
from agentloop.training.plan.settings import lends_memory
from agentloop.training.run.status import count_of


def report(plan: Plan) -> str:
    """Return the estimates and warnings, one per line."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(p: Plan) -> Iterator[str]:
    s, loop, learner, shape = p.settings, p.settings.loop, p.settings.learner, p.shape
    by = "counted in the weights" if shape.counted else "from the configuration"
    measures = p.on_gpus and learner.micro_batch_tokens is None  # how many tokens a pass may have
    yield f"model      {p.folder}: {amount(shape.num_parameters)} parameters ({by})"
    yield (
        f"           {shape.num_layers} layers of {shape.hidden_size}, vocabulary "
        f"{number(shape.vocab_size)}, context {number(shape.context_length)}"
    )
    tokens = number(s.budget.max_response_tokens)
    yield f"steps      {loop.steps}; each of them:"
    yield (
        f"  roll out {count_of(loop.prompts_per_step, 'task')}, "
        f"{count_of(loop.group_size, 'time')} each: "
        f"{count_of(p.num_rollouts, 'rollout')} of at most {tokens} tokens and "
        f"{count_of(s.budget.max_turns, 'turn')}, {amount(p.max_tokens)} tokens in total"
    )
    passes = f"at least {count_of(_micro_batches(p), 'micro-batch', 'micro-batches')} per rank, "
    if measures:
        passes = ""
    yield (
        f"  train    on at most {number(p.num_kept)} of them, {amount(p.max_kept_tokens)} "
        f"tokens: {passes}"
        f"{count_of(learner.updates_per_batch, 'optimizer step')}"
    )
    where = count_of(s.server.count, "server")
    if s.servers:
        where = count_of(len(s.servers), "external server")
    yield f"  publish  {size(p.disk.weights)} of weights for {where}"
    if loop.evaluate_every:
        yield (
            f"  every {count_of(loop.evaluate_every, 'step')}, evaluate "
            f"at most {count_of(loop.evaluate_tasks, 'held-out task')}, once each"
        )
    m = p.learner
    device = "GPU" if p.on_gpus else "process"
    nodes = f" on each of {s.ranks.nodes} nodes" if s.ranks.nodes > 1 else ""
    yield (
        f"learner    {count_of(s.ranks.nproc_per_node, 'rank')}{nodes}, ZeRO {learner.zero_stage}, "
        f"{learner.dtype}: {size(m.total)} per {device}"
    )
    if learner.lora.rank:
        yield f"  LoRA with {amount(num_trained(shape, learner))} trained parameters"
    kept = "checkpointed" if learner.activation_checkpointing else "not checkpointed"
    more = "; more at once where there is room" if measures else ""
    parts = (
        ("weights", m.weights, ""),
        ("gradients", m.gradients, ""),
        ("optimizer", m.optimizer, ""),
        ("buffers", m.buffers, "DeepSpeed's"),
        ("activations", m.activations, f"{number(p.pass_tokens)} tokens, {kept}{more}"),
        ("logits", m.logits, f"{number(learner.head_chunk_tokens)} tokens at a time"),
    )  # fmt: skip
    for name, num_bytes, note in parts:
        yield f"  {name:<12} {size(num_bytes):>10}  {note}".rstrip()
    if m.offloaded:
        yield f"  offloaded    {size(m.offloaded):>10}  of host memory, per rank"
    yield f"  at startup   {size(m.loading):>10}  of host memory, for all ranks of a node"
    parallelism = "" if s.servers else f", tp {s.server.tp_size}, dp {s.server.dp_size}"
    yield f"inference  {where}{parallelism}; on each {device}:"
    yield f"  weights      {size(p.server.weights):>10}"
    yield (
        f"  KV cache     {size(p.server.kv_token):>10}  per token, {size(p.server.rollout)} per "
        "rollout that uses up its budget"
    )
    if p.server.kv_cache is not None and not s.servers:
        yield f"               {size(p.server.kv_cache):>10}  in total"
    if p.shares_gpus:
        yield from _phases(p)
    d = p.disk
    yield f"disk       {s.run.folder}: up to {size(d.total)}"
    yield f"  weights      {size(d.weights):>10}  twice while they are being replaced"
    yield f"  checkpoints  {size(d.checkpoints):>10}  at most, {size(d.checkpoint)} each"
    per_step = size(d.trajectories_per_step)
    yield f"  trajectories {size(d.trajectories):>10}  at most, {per_step} per step"
    if d.kept_ids_per_step:
        yield (
            f"  kept ids     {size(d.kept_ids_per_step):>10}  of these per step, if each token "
            f"keeps all {s.sampling.top_k} (sampling.top_k)"
        )
    if d.experts_per_step:
        yield f"  experts      {size(d.experts_per_step):>10}  of these per step (routing_replay)"
    where = "the cluster" if s.cluster.address else "this machine"
    gpus = f", {count_of(p.num_gpus, 'GPU')} of {where}" if p.on_gpus else ", no GPU"
    yield f"processes  {p.num_processes} (servers and ranks){gpus}"
    for warning in p.warnings:
        yield f"warning    {warning}"


def _micro_batches(p: Plan) -> int:
    ranks = p.settings.ranks
    return math.ceil(p.max_kept_tokens / p.pass_tokens / (ranks.nproc_per_node * ranks.nodes))


def _phases(p: Plan) -> Iterator[str]:
    if not lends_memory(p.settings):
        yield "  shared with the ranks: servers keep their memory while the learner works"
        return
    rollouts, step = p.phases
    yield (
        "  shared with the ranks: servers give their memory back in each step; "
        f"{size(rollouts)} during rollouts, {size(step)} in a step"
    )
