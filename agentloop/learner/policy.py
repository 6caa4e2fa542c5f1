"""The policy in training: a causal language model, sharded over the ranks by DeepSpeed ZeRO.

    Batch ──parts──> updates ──plan──> micro-batches of this rank
                                         │ forward: log-probabilities of the sampled tokens
                                         │ policy_loss, times the number of ranks (ZeRO averages)
                                         ▼ backward; gradients are reduced
                                       one AdamW step, or none if a gradient is not finite

All ranks do the same number of forward and backward passes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentloop.errors import ModelError
from agentloop.learner.attention import (
    PACKED,
    arguments,
    has_state,
    register,
    state_arguments,
    why_not_shared,
)
from agentloop.learner.batch import (
    Array,
    Batch,
    MicroBatch,
    PackedSegment,
    make_micro_batch,
    normalized_weights,
    parts,
    plan,
    shared_prefixes,
)
from agentloop.learner.errors import BatchError, GradientError
from agentloop.learner.forward_check import compare, depends_on_longest
from agentloop.learner.head import Head, Scores, compile_layers, scores_of, uses_compiler
from agentloop.learner.lora import add_adapters
from agentloop.learner.loss import LossInput, policy_loss
from agentloop.learner.names import conversions_of
from agentloop.learner.optimizer import adamw, batch_operations, deepspeed_config
from agentloop.learner.pass_size import PassSize
from agentloop.learner.reference import Reference
from agentloop.learner.routing import RoutingReplay
from agentloop.learner.utilization import Work, peak_tflops
from agentloop.learner.world import Clock, World, to_device
from agentloop.models.folder import tensor_files
from agentloop.plain_json import JsonObject
from agentloop.training.learner_client.protocol import StepReply
from agentloop.training.learner_client.settings import LearnerSettings, LoraSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Metrics: TypeAlias = dict[str, int | float | None]
"""Metrics of a step by name; None: not finite, or it does not apply."""

_MAX_SKIPPED_STEPS = 3  # in a row; then the learner ends


def load_model(settings: LearnerSettings) -> PreTrainedModel:
    """Load the model of `settings` on the CPU.

    Raises:
        ModelError: It cannot be loaded.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    register()
    try:
        model = _create_model(settings)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"{settings.model}: {error}") from error
    if settings.lora.rank:
        add_adapters(model, settings)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _create_model(settings: LearnerSettings) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": settings.attention,
    }
    if settings.init == "pretrained":
        if quantized := _read_config(settings).get("quantization_config"):
            raise ModelError(
                f"{settings.model}: its weights are quantized "
                f"({quantized.get('quant_method', 'config.json: quantization_config')}), which "
                "cannot be trained: start from the same model in bfloat16"
            )
        return AutoModelForCausalLM.from_pretrained(
            settings.model, local_files_only=True, **options
        )
    values = config_of(settings)
    try:
        config = AutoConfig.for_model(**values)
        _check_config(settings, type(config))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)  # the same on every rank
            return AutoModelForCausalLM.from_config(config, **options)
    except ModelError:
        raise
    except Exception as error:  # an invalid value can break a model anywhere
        if not settings.config:
            raise
        raise ModelError(f"learner.config: cannot create the model: {error!r}") from error


def config_of(settings: LearnerSettings) -> JsonObject:
    """Return the model's config.json from its folder, updated with `settings.config`."""
    config = _read_config(settings)
    num, types = settings.config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(num, int) and types:  # additional layers are like the last one
        config["layer_types"] = types[:num] + types[-1:] * (num - len(types))
    return config | settings.config


def _read_config(settings: LearnerSettings) -> JsonObject:
    config: JsonObject = json.loads((settings.model / "config.json").read_text("utf-8"))
    return config


def _check_config(settings: LearnerSettings, kind: type[PretrainedConfig]) -> None:
    """Check `settings.config` against the folder's and against `kind`, a class of transformers.

    Raises:
        ModelError: A key or a value is invalid; the message names the key.
    """
    usual = kind().to_dict() | _read_config(settings)
    for key, value in settings.config.items():
        where = f"learner.config.{key}"
        if key not in usual:
            raise ModelError(f"{where}: {kind.__name__} has no such setting")
        if not _has_same_type(value, usual[key]):
            raise ModelError(f"{where}: expected {type(usual[key]).__name__}, not {value!r}")
    size, file = settings.config.get("vocab_size"), settings.model / "tokenizer.json"
    if isinstance(size, int) and file.is_file():
        from tokenizers import Tokenizer

        num_ids = max(Tokenizer.from_file(str(file)).get_vocab(True).values(), default=-1) + 1
        if size < num_ids:
            raise ModelError(
                f"learner.config.vocab_size: {size}, but the tokenizer needs {num_ids}"
            )


def _has_same_type(value: object, usual: object) -> bool:
    """Return whether the types match; an int also passes for a float, a bool never for a number."""
    if usual is None or value is None:
        return True
    kinds = (int, float) if type(usual) is float else (type(usual),)
    return isinstance(value, kinds) and isinstance(value, bool) == isinstance(usual, bool)


class TokenScorer(torch.nn.Module):  # type: ignore[misc]
    """A causal language model that returns log-probabilities and entropies instead of logits."""

    def __init__(self, model: PreTrainedModel, settings: LearnerSettings) -> None:
        super().__init__()
        self.model = model
        self.head = Head(model.get_output_embeddings(), settings)
        self._attention = settings.attention
        self._temperature = settings.temperature
        self._has_state = has_state(model)
        self._uses_own_logits = False
        self.routing = RoutingReplay(model) if settings.routing_replay else None
        if uses_compiler(settings):
            compile_layers(model)

    def forward(
        self,
        ids_L: Tensor,
        positions_L: Tensor,
        predictors_M: Tensor,
        targets_M: Tensor,
        segments: tuple[PackedSegment, ...],
        kept_MK: Tensor | None = None,
        experts_LW: Tensor | None = None,
    ) -> Scores:
        """Return (log-probabilities, entropies), each float32 [M], of packed samples.

        They are those of the distributions over the kept ids, where there are some, and with
        routing replay those of the recorded experts.
        """
        if self.routing is not None:
            self.routing.experts = experts_LW
        if self._uses_own_logits:
            logits_LV = self.model(input_ids=ids_L[None], use_cache=False).logits[0]
            return scores_of(logits_LV.index_select(0, predictors_M), targets_M, self._temperature)
        more: dict[str, object] = {}
        if self._attention == PACKED:
            more |= arguments(segments, ids_L.device)
        if self._has_state:
            more |= state_arguments(segments, ids_L.device)
        output = self.model.base_model(
            input_ids=ids_L[None],
            position_ids=positions_L[None],
            attention_mask=None,  # makes transformers split the attention where positions restart
            use_cache=False,
            **more,
        )
        hidden_LH = output.last_hidden_state[0]
        scores: Scores = self.head(hidden_LH.index_select(0, predictors_M), targets_M, kept_MK)
        return scores

    @contextmanager
    def own_logits(self) -> Iterator[None]:
        """Score by the model's own forward pass: its own attention, output layer and logits.

        What is scored must be a single sample.
        """
        self.model.set_attn_implementation("eager")  # what each model defines itself
        self._uses_own_logits = True
        try:
            yield
        finally:
            self._uses_own_logits = False
            self.model.set_attn_implementation(self._attention)


@dataclass(frozen=True, slots=True)
class Counters:
    """The state of a policy besides weights and optimizer."""

    num_updates: int
    num_skipped: int
    warm_from: int


@dataclass(frozen=True, slots=True)
class _Update:
    """The metrics of one optimizer step.

    Attributes:
        sums: Sums over the tokens, by the names of `policy_loss`.
        grad_norm: None if the step was skipped.
    """

    loss: float
    sums: Mapping[str, float]
    grad_norm: float | None
    lr: float
    skipped: bool


class Policy:
    """The model in training, on this rank.

    Attributes:
        num_updates: Optimizer steps applied, restarts included.
        num_skipped: Steps skipped because a gradient was not finite.
        num_parameters, num_trained: Counts of the whole model; with LoRA few are trained.
        engine: DeepSpeed's engine; `model` is the model in it.
        start: The file of each tensor that training started from; None: the weights were random.
        conversions: How the model's tensors are published.
    """

    def __init__(self, settings: LearnerSettings, world: World) -> None:
        """Load the model, shard it and wait for the other ranks.

        Each rank loads the whole model into its memory before sharding.

        Raises:
            ModelError: See `load_model`; or the learner's forward pass is not the model's.
        """
        import deepspeed

        self.settings, self.world = settings, world
        self.num_updates = self.num_skipped = self._skipped_in_row = self._warm_from = 0
        torch.manual_seed(settings.seed + world.rank)
        self.model = load_model(settings)
        # Before ZeRO 3 partitions the parameters.
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        self.num_parameters = sum(size for size, _ in sizes)
        self.num_trained = sum(size for size, trained in sizes if trained)
        pretrained = settings.init == "pretrained"
        self.start = tensor_files(settings.model) if pretrained else None
        self.conversions = conversions_of(self.model, self.start)
        self._work = Work.of(self.model)
        self._peak_tflops = settings.peak_tflops or peak_tflops(world.device_name, settings.dtype)
        self._pass_size = PassSize(settings, world)
        self._zero = torch.zeros((), dtype=torch.float64, device=world.device)
        reason = why_not_shared(self.model, settings, world.device.type)
        self._shares = reason is None
        if reason:
            self._say(f"What samples share is computed for each of them: {reason}")
        scorer = TokenScorer(self.model, settings)
        self._routing = scorer.routing
        self.engine, *_ = deepspeed.initialize(
            model=scorer,
            optimizer=adamw(scorer, settings),
            config=deepspeed_config(settings),
            dist_init_required=False,
        )
        batch_operations(self.engine.optimizer)
        self.engine.train()
        self._check_forward(scorer)
        self._reference = self._create_reference() if settings.loss.kl_coef else None

    def _say(self, text: str) -> None:
        if self.world.first:
            print(text, flush=True)

    def _check_forward(self, scorer: TokenScorer) -> None:
        """Compare scores with those of the model's own logits; find out whether samples may be
        packed.

        Raises:
            ModelError: The scores of a sample by itself are not those of the model.
        """
        self.engine.eval()
        compared = compare(
            scorer, lambda micro: self._score(micro, self.engine), share=self._shares
        )
        self.engine.train()
        compared.require_same(self.settings.dtype)
        reason = compared.why_not_packed(self.settings.dtype) or depends_on_longest(
            self.model.config, self.settings.max_sample_tokens
        )
        self._packs = reason is None
        if reason:
            self._shares = False
            self._say(f"Each sample gets a forward pass of its own: {reason}")

    def _create_reference(self) -> Reference:
        changes = {"activation_checkpointing": False, "lora": LoraSettings()}
        settings = self.settings.model_copy(update=changes)
        return Reference.of(
            self.engine,
            lambda: TokenScorer(load_model(settings), settings),
            self.world,
            zero=deepspeed_config(settings)["zero_optimization"],
            dtype=settings.dtype,
        )

    def check(self, batch: Batch) -> None:
        """Check that the batch suits this model; `step` and `logprobs` rely on it.

        Raises:
            BatchError: The batch does not suit the model.
        """
        vocab = self.model.config.vocab_size
        if batch.ids.max() >= vocab:
            raise BatchError(
                f"ids: {int(batch.ids.max())} is out of range, the vocabulary has {vocab}"
            )
        if batch.kept is not None and batch.kept.max(initial=0) >= vocab:
            raise BatchError(f"kept: {batch.kept.max()} is out of range")
        if self._routing is not None:
            self._routing.check(batch)

    def step(self, batch: Batch, lr: float | None = None) -> StepReply:
        """Train on a batch in `updates_per_batch` steps; return metrics over all of them.

        A sample longer than `max_sample_tokens` is left out: a forward pass of it might not fit
        into memory, and one long prompt must not end a run.

        Raises:
            GradientError: Too many steps in a row had no finite gradient.
        """
        fitting = batch.up_to(self.settings.max_sample_tokens)
        num_too_long = len(batch.lengths) - (0 if fitting is None else len(fitting.lengths))
        metrics = self._empty_metrics() if fitting is None else self._step(fitting, lr)
        return StepReply.model_validate({**metrics, "num_too_long": num_too_long})

    def _empty_metrics(self) -> Metrics:
        counts = {"num_samples": 0, "num_tokens": 0, "skipped": 0, **asdict(self.counters())}
        return {"loss": None, "grad_norm": None, **counts}

    def _step(self, batch: Batch, lr: float | None) -> Metrics:
        clock = Clock(self.world)
        loss = self.settings.loss
        updates = parts(batch.groups.tolist(), self.settings.updates_per_batch)
        if batch.old_logprobs is None and loss.old_logprobs_from == "engine":
            batch = replace(batch, old_logprobs=batch.logprobs)
        elif batch.old_logprobs is None and len(updates) > 1:
            batch = replace(batch, old_logprobs=self.logprobs(batch))
            clock.lap("old_logprobs_s")
        if self._reference is not None and batch.ref_logprobs is None:
            with self._reference.scorer() as scorer:
                routed = replace(batch, expert_counts=None, experts=None)  # by its own routers
                batch = replace(batch, ref_logprobs=self._scores(scorer, routed)[0])
            clock.lap("ref_logprobs_s")
        done = [self._update(batch, samples, lr, clock) for samples in updates]
        num_tokens = int(batch.mask.sum())
        norms = [update.grad_norm for update in done if update.grad_norm is not None]
        metrics = {
            "loss": sum(update.loss for update in done) / len(done),
            **{
                name: sum(update.sums[name] for update in done) / num_tokens
                for name in done[0].sums
            },
            "grad_norm": sum(norms) / len(norms) if norms else None,
            "lr": done[-1].lr,
            "num_samples": len(batch.lengths),
            "num_tokens": num_tokens,
            **asdict(self.counters()),
            **self._replayed(batch),
            "skipped": sum(update.skipped for update in done),
            **self._speed(batch, clock),
            **self._pass_size.measure(self.world),
        }
        # JSON has neither infinity nor NaN.
        return {k: v if v is not None and math.isfinite(v) else None for k, v in metrics.items()}

    def _replayed(self, batch: Batch) -> dict[str, float]:
        """Return the share of sampled tokens that recorded experts predict."""
        if self._routing is None:
            return {}
        if batch.expert_counts is None:
            return {"routing_replayed": 0.0}
        counts = batch.expert_counts[np.flatnonzero(batch.mask) - 1]
        return {"routing_replayed": float((counts > 0).mean())}

    def _speed(self, batch: Batch, clock: Clock) -> dict[str, float]:
        """Return the speed of this rank, which is that of all: they wait for each other."""
        seconds, laps = clock.stop()
        order, shared = self._in_order(batch, range(len(batch.lengths)))
        lengths = batch.lengths[order].tolist()
        speed = {"tokens_per_s": len(batch.ids) / seconds, "shared": sum(shared) / sum(lengths)}
        speed |= laps
        if self._work and self._peak_tflops:
            work = self._work.of_batch(lengths, int(batch.mask.sum()), shared)
            speed["mfu"] = work / seconds / (self._peak_tflops * 1e12 * self.world.size)
        return speed

    def _update(
        self, batch: Batch, samples: Sequence[int], lr: float | None, clock: Clock
    ) -> _Update:
        weights_T = normalized_weights(batch, samples)
        # They stay on the device, such that the host launches the next pass during this one.
        sums: dict[str, Tensor] = defaultdict(lambda: self._zero.clone())
        for micro in self._micro_batches(batch, samples, weights_T):
            loss, sums_of_micro = self._forward_loss(micro)
            real = micro.source[0] >= 0
            for name, value in {"loss": loss.detach(), **sums_of_micro}.items():
                sums[name] += value if real else 0
            clock.lap("forward_s")
            self.engine.backward(loss * self.world.size, scale_wrt_gas=False)
            clock.lap("backward_s")
        rate = self._learning_rate() if lr is None else lr
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        clock.lap("optimizer_s")
        skipped = bool(self.engine.optimizer.overflow)
        if skipped:
            self._drop_gradients()
        norm = None if skipped else float(self.engine.get_global_grad_norm())
        self._count_step(skipped)
        totals = self.world.all_reduce_named(sums)
        return _Update(totals.pop("loss"), totals, norm, rate, skipped)

    def _forward_loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        new, entropy = self._score(micro, self.engine)
        on = self._on_device
        batch = LossInput(
            new=new,
            old=new.detach() if micro.old is None else on(micro.old),
            engine=on(micro.engine),
            advantage=on(micro.advantages),
            weight=on(micro.weights),
            sample=on(micro.sample),
            entropy=entropy,
            reference=None if micro.reference is None else on(micro.reference),
        )
        loss, sums = policy_loss(batch, self.settings.loss)
        # If it is not finite, so is no gradient: their norm, shared by all ranks, tells the others.
        # Not by the loss's own graph, in which a clipped token passes nothing on.
        zero_or_nan = torch.where(loss.detach().isfinite(), 0.0, math.nan)
        return loss + new.nan_to_num().sum() * zero_or_nan, sums

    def _count_step(self, skipped: bool) -> None:
        if not skipped:
            self.num_updates += 1
            self._skipped_in_row = 0
            return
        self.num_skipped += 1
        self._skipped_in_row += 1
        if self._skipped_in_row >= _MAX_SKIPPED_STEPS:
            raise GradientError(
                f"{self._skipped_in_row} steps in a row had no finite gradient: the weights are "
                f"those after {self.num_updates} updates"
            )

    def _drop_gradients(self) -> None:
        """Drop the gradients of a skipped step.

        With offload, DeepSpeed's ZeRO 1 and 2 keep the gradients that they accumulate in another
        type, and would add the next step's to them.
        """
        sums = getattr(self.engine.optimizer, "averaged_gradients", None)
        if self.settings.zero_stage < 3 and sums:
            sums.update(dict.fromkeys(sums))

    def _learning_rate(self) -> float:
        o = self.settings.optimizer
        done = self.num_updates - self._warm_from
        return o.lr * min(1.0, (done + 1) / max(1, o.warmup_steps))

    def reset_optimizer(self) -> None:
        """Reset AdamW to its state before the first step.

        The moments are 0, the bias correction starts again, and so does the warm-up of the rate.
        """
        self._warm_from = self.num_updates
        for state in self.engine.optimizer.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    value.zero_()

    def logprobs(self, batch: Batch) -> Array:
        """Return the log-probabilities of the sampled tokens, float32 [T], 0 elsewhere
        (collective).

        Every sample must fit into a micro-batch.
        """
        logprobs: Array = self.scores(batch)[0]
        return logprobs

    def scores(self, batch: Batch) -> Array:
        """Return the log-probabilities and entropies of the sampled tokens (collective).

        float32 [2, T], 0 elsewhere; an entropy, in nats, is that of the distribution that the token
        was sampled from. Every sample must fit into a micro-batch.
        """
        return self._scores(self.engine, batch)

    def _scores(self, scorer: torch.nn.Module, batch: Batch) -> Array:
        found_2T = torch.zeros(2, len(batch.ids))
        samples = range(len(batch.lengths))
        self.engine.eval()
        with torch.no_grad():
            for micro in self._micro_batches(batch, samples, np.zeros_like(batch.logprobs)):
                scored = torch.stack(self._score(micro, scorer))
                if micro.source[0] >= 0:
                    found_2T[:, torch.from_numpy(micro.source)] = scored.cpu()
        self.engine.train()
        scores: Array = self.world.all_reduce(found_2T).numpy()
        return scores

    def _micro_batches(
        self, batch: Batch, samples: Sequence[int], weights_T: Array
    ) -> Iterator[MicroBatch]:
        order, shared = self._in_order(batch, samples)
        lengths = batch.lengths[order].tolist()
        limit = self._pass_size.limit(lengths)
        ranks = plan(lengths, limit, self.world.size, shared, packs=self._packs)
        for indices in ranks[self.world.rank]:
            chosen = [order[i] for i in indices]
            micro = make_micro_batch(batch, chosen, weights_T, share=self._shares)
            self._pass_size.largest = max(self._pass_size.largest, len(micro.ids))
            yield micro

    def _in_order(self, batch: Batch, samples: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return `shared_prefixes`, unless the model can share nothing."""
        if self._shares:
            return shared_prefixes(batch, samples)
        return list(samples), [0] * len(samples)

    def _score(self, micro: MicroBatch, scorer: torch.nn.Module) -> Scores:
        where = (micro.ids, micro.positions, micro.predictors, micro.targets)
        recorded = (
            None if array is None else self._on_device(array)
            for array in (micro.kept, micro.experts)
        )
        scores: Scores = scorer(*map(self._on_device, where), micro.segments, *recorded)
        return scores

    def _on_device(self, array: Array) -> Tensor:
        return to_device(torch.from_numpy(array), self.world.device)

    def counters(self) -> Counters:
        """Return the counters that a checkpoint keeps besides weights and optimizer."""
        return Counters(self.num_updates, self.num_skipped, self._warm_from)

    def set_counters(self, counters: Counters) -> None:
        self.num_updates, self.num_skipped = counters.num_updates, counters.num_skipped
        self._warm_from = counters.warm_from
        self._skipped_in_row = 0
