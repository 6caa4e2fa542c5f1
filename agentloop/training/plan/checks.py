"""Check before a training run, or for its `--dry-run`, that its settings go together, and that this
machine has what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from agentloop.environments.mixture import RunEnvironment
from agentloop.errors import SettingsError
from agentloop.launch.machine import require_servers
from agentloop.models import SMALL
from agentloop.token_records import MAX_KEPT_IDS
from agentloop.training.cluster.ray_cluster import require_ray
from agentloop.training.loop.settings import LoopSettings
from agentloop.training.plan.cluster import cluster_problems
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.sft.run import model_folder, require_learner
from agentloop.training.weight_sync.process_group import GROUP_TIMEOUT_S

_MIN_TEMPERATURE = 1e-5  # SGLang samples greedily below it
_MAX_KEPT_IDS_OF_ROLLOUT = 1 << 23  # 32 MiB of the learner's memory


def check_settings(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the model's folder resolved.

    Raises:
        SettingsError: settings contradict each other; the message names all that do.
    """
    s = settings
    problems: list[str] = []
    for section in (_model, cluster_problems, _sampling, _timeouts, _groups, _lengths, _stages):
        try:
            problems += section(s)
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("; ".join(dict.fromkeys(problems)))
    update: dict[str, object] = {"model": str(model_folder(s.model or SMALL))}
    if s.cluster.address:  # other nodes have other working directories
        update["run"] = s.run.model_copy(update={"folder": s.run.folder.absolute()})
    return s.model_copy(update=update)


def _model(s: TrainSettings) -> Iterator[str]:
    if s.servers and s.sft:
        yield "sft: `servers` already serve a model: run `agentloop sft` before them"
    if s.servers and not s.model:
        yield "model: set the folder of the model that `servers` serve"
    model_folder(s.model or SMALL)


def _sampling(s: TrainSettings) -> Iterator[str]:
    sampling, longest = s.sampling, s.as_one_stage().budget.max_response_tokens
    greedy = {
        "temperature": sampling.temperature < _MIN_TEMPERATURE,
        "top_k": sampling.top_k == 1,
        "min_p": sampling.min_p == 1,
    }
    for name in (name for name, is_greedy in greedy.items() if is_greedy):
        yield (
            f"sampling.{name}: {getattr(sampling, name):g} is greedy: all rollouts of a task would "
            "be the same"
        )
    if sampling.truncates and not 0 < sampling.top_k <= MAX_KEPT_IDS:
        yield (
            f"sampling.top_k: {sampling.top_k} must be from 2 to {MAX_KEPT_IDS} with top_p, top_k "
            "or min_p: the learner needs the ids that they left to sample from, and SGLang reports "
            "no more for a token"
        )
    elif sampling.top_k * longest > _MAX_KEPT_IDS_OF_ROLLOUT:
        yield (
            f"sampling.top_k: {sampling.top_k} with budget.max_response_tokens ({longest}) may "
            f"leave {sampling.top_k * longest:,} ids to record of a rollout, and "
            f"{_MAX_KEPT_IDS_OF_ROLLOUT:,} are the most: lower one of them"
        )
    yield from s.credit.problems(
        temperature=s.sampling.temperature, clip_low=s.learner.loss.clip_low
    )


def _timeouts(s: TrainSettings) -> Iterator[str]:
    if s.weights.transport == "broadcast" and s.learner.collective_timeout_s <= GROUP_TIMEOUT_S:
        yield (
            f"learner.collective_timeout_s: {s.learner.collective_timeout_s:g} must be above "
            f"{GROUP_TIMEOUT_S:g} with weights.transport = broadcast: so long rank 0 waits for "
            "servers while the other ranks wait for rank 0"
        )
    give_up_s, step_s = s.watchdog.give_up_s, s.loop.step_timeout_s
    if 0 < give_up_s <= step_s:
        yield (
            f"watchdog.give_up_s: {give_up_s:g} must be above loop.step_timeout_s ({step_s:g}), "
            "or a long step would end the run"
        )


def _groups(s: TrainSettings) -> Iterator[str]:
    if not s.loop.learn or not (s.loop.steps or s.stages) or s.credit.rule.needs_teacher:
        return
    size, stop_at, down_sample_to = s.loop.group_size, s.loop.early_stop_at, s.roc.down_sample_to_n
    if size < max(2, down_sample_to):
        yield (
            f"loop.group_size: {size} must be at least 2, and at least roc.down_sample_to_n "
            f"({down_sample_to}), or every group would be rejected"
        )
    if 0 < stop_at < down_sample_to:
        yield (
            f"loop.early_stop_at: {stop_at} must be at least roc.down_sample_to_n "
            f"({down_sample_to}), or 0 to wait for all rollouts"
        )
    if stop_at > size:
        yield (
            f"loop.early_stop_at: {stop_at} must be at most loop.group_size ({size}), or 0 to wait "
            "for all rollouts"
        )


def _lengths(s: TrainSettings) -> Iterator[str]:
    num_tokens = s.as_one_stage().budget.max_response_tokens
    if s.learner.max_sample_tokens <= num_tokens:
        yield (
            f"learner.micro_batch_tokens: {s.learner.max_sample_tokens} must be above "
            f"budget.max_response_tokens ({num_tokens}): a prompt comes on top"
        )


def _stages(s: TrainSettings) -> Iterator[str]:
    if s.stages and s.loop.steps != LoopSettings().steps:
        yield "loop.steps: not used with stages, each of which has its own: omit it"
    if not s.loop.steps and not s.stages and not any(map(_holds_out, s.environments)):
        yield "tasks.held_out: set it: with loop.steps = 0 the run only evaluates"


def _holds_out(environment: RunEnvironment) -> bool:
    if environment.tasks.held_out or environment.tasks.held_out_split:
        return True
    loaded = environment.load()
    return loaded is not None and loaded.held_out_tasks is not None


def require_machine(settings: TrainSettings) -> None:
    """Check for the packages and the GPU that the learner needs, and the servers that this process
    would start.

    Raises:
        SettingsError: some are missing; names them and what to do.
    """
    on_cluster = bool(settings.cluster.address)
    if on_cluster:
        require_ray()
    # In the order of installation: the learner takes SGLang's PyTorch.
    checks: list[Callable[[], None]] = []
    if not settings.servers and not on_cluster:
        checks.append(partial(require_servers, settings.server))
    checks.append(partial(require_learner, settings.learner))
    problems = []
    for check in checks:
        try:
            check()
        except SettingsError as problem:
            problems.append(str(problem))
    if problems:
        raise SettingsError("; ".join(problems))
