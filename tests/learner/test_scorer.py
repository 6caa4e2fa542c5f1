"""Log-probabilities of packed samples, in chunks, against whole logits of single samples."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentloop.errors import ModelError
from agentloop.learner import head
from agentloop.learner.attention import arguments, packed_attention
from agentloop.learner.batch import Batch, PackedSegment, make_micro_batch
from agentloop.learner.policy import TokenScorer, load_model
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import LearnerSettings, LossSettings
from tests.learner import plain
from tests.learner.ranks import make_batch, with_kept_ids

pytestmark = [pytest.mark.real, pytest.mark.gate]
SETTINGS = LearnerSettings(model=SMALL, head_chunk_tokens=7)
SAMPLES = (2, 0, 3, 1)
VOCAB_SIZE = 512


def packed(scorer: Any, batch: Batch) -> tuple[Any, Any, Any]:
    """Return the scorer's results, and the weights that make a loss of them."""
    weights = np.random.default_rng(1).normal(size=len(batch.ids)).astype(np.float32)
    micro = make_micro_batch(batch, SAMPLES, weights)
    inputs = (micro.ids, micro.positions, micro.predictors, micro.targets)
    kept = None if micro.kept is None else torch.from_numpy(micro.kept)
    logprobs, entropy = scorer(*map(torch.from_numpy, inputs), micro.segments, kept)
    return logprobs, entropy, micro


@pytest.fixture(scope="module", params=["packed", "sdpa"])
def scorer(request: pytest.FixtureRequest) -> Any:
    settings = SETTINGS.model_copy(update={"attention": request.param})
    return TokenScorer(load_model(settings), settings)


@pytest.fixture(scope="module")
def reference() -> Any:
    return plain.load(SETTINGS)


@pytest.mark.parametrize(
    "batch",
    [make_batch(), with_kept_ids(make_batch()), with_kept_ids(make_batch(), num_whole=20)],
    ids=["whole", "kept", "mixed"],
)
def test_packed_equals_unpacked(scorer: Any, reference: Any, batch: Batch) -> None:
    logprobs, entropy, micro = packed(scorer, batch)
    result = dict(zip(micro.source.tolist(), zip(logprobs, entropy, strict=True), strict=True))
    loss: Any = 0.0
    for index in range(4):
        expected, entropies, place = plain.scores(reference, batch, index)
        for at, (first, second) in enumerate(zip(expected, entropies, strict=True), place.start):
            if batch.mask[at]:
                assert result[at][0].item() == pytest.approx(first.item(), abs=1e-4)
                assert result[at][1].item() == pytest.approx(second.item(), abs=1e-4)
                loss = loss + first * float(micro.weights[micro.source == at][0])
    scorer.zero_grad()
    reference.zero_grad()
    (logprobs * torch.from_numpy(micro.weights)).sum().backward()
    loss.backward()
    for first, second in zip(scorer.parameters(), reference.parameters(), strict=True):
        scale = second.grad.abs().max().item()
        assert (first.grad - second.grad).abs().max().item() <= 1e-4 * scale


def test_samples_do_not_attend_to_each_other(scorer: Any) -> None:
    batch = make_batch()
    ids = batch.ids.copy()
    ids[:40] = 3  # sample 0
    before, _, micro = packed(scorer, batch)
    after, _, _ = packed(scorer, replace(batch, ids=ids))
    remaining = torch.from_numpy(micro.source >= 40)
    assert (before[remaining] - after[remaining]).abs().max().item() < 1e-5
    assert (before[~remaining] - after[~remaining]).abs().max().item() > 0.1


def test_temperature_and_entropy_gradients() -> None:
    settings = SETTINGS.model_copy(
        update={"temperature": 0.7, "loss": LossSettings(entropy_coef=0.1)}
    )
    scorer = TokenScorer(load_model(settings), settings)
    batch = make_batch()
    logprobs, entropy, micro = packed(scorer, batch)
    assert entropy.requires_grad
    hidden = scorer.model(
        input_ids=torch.from_numpy(micro.ids)[None],
        position_ids=torch.from_numpy(micro.positions)[None],
        **arguments(micro.segments, torch.device("cpu")),
        use_cache=False,
    )
    table = (hidden.logits[0, micro.predictors] / 0.7).log_softmax(-1)
    expected = table.gather(-1, torch.from_numpy(micro.targets)[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-4)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-4)


def test_without_a_bonus_the_entropy_is_a_metric_alone(scorer: Any) -> None:
    _, entropy, _ = packed(scorer, make_batch())
    assert not entropy.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_over_kept_ids_are_those_of_masked_logits(temperature: float) -> None:
    """Of log-probabilities and entropies, in float64: equal to rounding."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 39, 7, 7, 20, 1])
    rows = [[0], [3, 39, 4], [7, 1, 2, 3], [6, 7], [*range(40)], []]
    kept = torch.full((6, 40), -1, dtype=torch.int32)
    masked = torch.zeros(6, 40, dtype=torch.bool)
    for index, row in enumerate(rows):
        kept[index, : len(row)] = torch.tensor(row)
        masked[index, row or slice(None)] = True

    def results(scores: Any) -> list[Any]:
        leaf = logits.clone().requires_grad_()
        logprobs, entropies = scores(leaf)
        weights = torch.linspace(-1, 1, 6)
        loss = (logprobs * weights).sum() + (entropies * weights**2).sum()
        return [logprobs, entropies, *torch.autograd.grad(loss, [leaf])]

    def plainly(leaf: Any) -> tuple[Any, Any]:
        table = (leaf / temperature).masked_fill(~masked, -1e9).log_softmax(-1)
        return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)

    computed = results(lambda leaf: head.kept_scores_of(leaf, targets, kept, temperature, True))
    for result, expected in zip(computed, results(plainly), strict=True):
        assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_form_for_the_compiler_computes_the_same(entropy_grad: bool, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, generator=generator) for rows in (5, 40))
    targets = torch.tensor([0, 39, 7, 7, 20])

    def results(scores: Any) -> list[Any]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logprobs, entropies = scores(*inputs, None, targets, temperature, entropy_grad)
        assert entropies.requires_grad == entropy_grad
        weights = torch.linspace(-1, 1, 5)
        loss = (logprobs * weights).sum() + (entropies * weights**2).sum()
        return [logprobs, entropies, *torch.autograd.grad(loss, inputs)]

    def plainly(hidden: Any, weight: Any, _bias: None, *options: Any) -> Any:
        return head.scores_of(hidden @ weight.T, *options)

    pairs = zip(results(head._fusible_scores), results(plainly), strict=True)
    for result, expected in pairs:
        assert torch.allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_does_not_change_the_gradients() -> None:
    """Loss and gradients are unchanged; between the passes only the layers' inputs are kept."""

    def trained(activation_checkpointing: bool) -> tuple[Any, list[Any], int]:
        settings = SETTINGS.model_copy(
            update={"activation_checkpointing": activation_checkpointing}
        )
        scorer = TokenScorer(load_model(settings), settings).train()
        num_kept = 0

        def note(tensor: Any) -> Any:
            nonlocal num_kept
            num_kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs, _, micro = packed(scorer, make_batch())
        loss = (logprobs * torch.from_numpy(micro.weights)).sum()
        loss.backward()
        return loss, [p.grad for p in scorer.parameters()], num_kept

    loss, gradients, num_kept = trained(False)
    again, remaining, fewer = trained(True)
    assert torch.equal(loss, again)
    assert all(
        torch.equal(first, second) for first, second in zip(gradients, remaining, strict=True)
    )
    assert fewer < num_kept / 3


class Shapes(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to mypy
    """Records the number of rows of every operation's result, also in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == VOCAB_SIZE:
            self.rows.append(out.shape[0])
        return out


def test_whole_logits_never_exist(scorer: Any) -> None:
    with Shapes() as shapes:
        logprobs, _, micro = packed(scorer, make_batch())
        num_forward = sum(shapes.rows)
        logprobs.sum().backward()
    assert num_forward >= len(micro.source)
    assert sum(shapes.rows) >= 2 * num_forward, "made again"
    # The output layer's weight is seen transposed: [128, 512].
    assert {rows for rows in shapes.rows if rows != 128} <= set(range(8))


def test_packed_attention_refuses_unsupported_models() -> None:
    first = torch.zeros(1, 2, 6, 4)
    given = arguments((PackedSegment(0, 2, 2), PackedSegment(2, 6, 6)), first.device)
    for more in ({"sliding_window": 3}, {"softcap": 30.0}, {"s_aux": first}):
        with pytest.raises(NotImplementedError, match="packed attention"):
            packed_attention(None, first, first, first, None, **more, **given)
    with pytest.raises(NotImplementedError, match="mask"):
        packed_attention(None, first, first, first, first, **given)
    out, _ = packed_attention(None, first, first, first, None, sliding_window=4, **given)
    assert out.shape == (1, 6, 2, 4)


def test_folder_without_a_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(SETTINGS.model_copy(update={"model": tmp_path}))


def test_additional_layers_are_like_the_last_one() -> None:
    num = len(json.loads((SMALL / "config.json").read_text())["layer_types"])
    for more in (-1, 1):
        config = {"num_hidden_layers": num + more}
        model = load_model(LearnerSettings(model=SMALL, init="random", config=config))
        assert len(model.base_model.layers) == len(model.config.layer_types) == num + more


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layers_hidden": 2}, "learner.config.num_layers_hidden: "),
        ({"num_hidden_layers": "two"}, "learner.config"),
        ({"hidden_size": 64.5}, "learner.config"),
        ({"hidden_size": -64}, "learner.config: cannot create the model"),
        ({"num_attention_heads": 0}, "learner.config"),
        ({"tie_word_embeddings": 1}, "learner.config"),
        ({"vocab_size": 8}, "learner.config.vocab_size: 8, but the tokenizer needs "),
    ],
)
def test_invalid_configuration_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(LearnerSettings(model=SMALL, init="random", config=config))


def test_random_weights_are_drawn_by_the_seed_alone(tmp_path: Any) -> None:
    """Only the folder's configuration is read; the ranks must agree without communication."""
    shutil.copy(SMALL / "config.json", tmp_path)

    def weights(seed: int) -> Any:
        torch.manual_seed(torch.seed() % 1000)  # as on another rank
        settings = LearnerSettings(model=tmp_path, init="random", seed=seed)
        return torch.nn.utils.parameters_to_vector(load_model(settings).parameters())

    first, again, second = weights(1), weights(1), weights(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert first.dtype == torch.float32
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(LearnerSettings(model=tmp_path))
