"""The deterministic parts of the learner's benchmark, and its plain loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.learner import Arm, agentic_batch, agentic_lengths, siblings_batch
from bench.micro_batches import arrange, waste

ROOT = Path(__file__).parents[2]


@given(st.integers(0, 1000), st.integers(32, 20_000))
def test_lengths_sum_up_and_keep_to_their_bounds(seed: int, num_tokens: int) -> None:
    lengths = agentic_lengths(seed, num_tokens)
    assert sum(lengths) == num_tokens
    assert min(lengths) >= 32
    assert max(lengths) <= 2048
    assert lengths == agentic_lengths(seed, num_tokens)


def test_lengths_have_a_long_tail() -> None:
    lengths = agentic_lengths(0, 1_000_000)
    assert 380 < np.mean(lengths) < 500
    assert np.mean(lengths) > 1.2 * np.median(lengths)
    assert max(lengths) == 2048


def test_batch_has_prompts_turns_and_observations() -> None:
    batch = agentic_batch(0, 4096, 512)  # Batch checks itself
    assert 0.5 < batch.mask.mean() < 0.75
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        assert not batch.mask[start : start + length // 5].any()
        assert batch.mask[start + length // 5 + 1]


def test_siblings_have_the_same_prompt() -> None:
    batch = siblings_batch(0, 512, groups=2, siblings=3, prompt=8, response=4)
    ids = batch.ids.reshape(2, 3, 12)
    assert (ids[:, :1, :8] == ids[:, :, :8]).all()
    assert (ids[0, 0, :8] != ids[1, 0, :8]).any()
    assert batch.mask.reshape(6, 12).sum(1).tolist() == [4] * 6


@given(st.lists(st.integers(2, 100), min_size=1, max_size=40), st.integers(100, 400))
@pytest.mark.parametrize("variant", ["packed", "sorted", "unsorted"])
def test_each_sample_is_once_in_a_micro_batch_that_fits(
    variant: str, lengths: list[int], budget: int
) -> None:
    batches = arrange(lengths, budget, variant)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        widths = [lengths[i] for i in batch]
        assert (sum(widths) if variant == "packed" else max(widths) * len(widths)) <= budget


def test_padding_is_to_the_longest_of_its_batch() -> None:
    lengths = [10, 40, 10, 40]
    assert arrange(lengths, 80, "unsorted") == [[0, 1], [2, 3]]
    assert waste(lengths, [[0, 1], [2, 3]]) == 1 - 100 / 160
    assert arrange(lengths, 80, "sorted") == [[1, 3], [0, 2]]
    assert waste(lengths, [[1, 3], [0, 2]]) == 0


def test_ratio_is_of_the_same_round() -> None:
    async def step(batch: Path) -> dict[str, Any]:
        raise NotImplementedError

    arm = Arm("slow, then slower", step)
    arm.seconds = [(1.0, 2.0), (2.0, 2.0), (4.0, 8.0)]
    arm.ratios = [(0.9, 0.8), (0.7, 0.9), (0.8, 0.7)]
    row = arm.row(num_tokens=100)
    assert (row["tokens/s"], row["tokens/CPU s"]) == (50, 50)
    assert (row["ratio"], row["ratio by CPU"]) == (0.8, 0.8)


def test_help_names_the_benchmarks() -> None:
    command = [sys.executable, "-m", "bench.learner", "--help"]
    output = subprocess.check_output(command, text=True, cwd=ROOT)
    assert "speed,packing,siblings,memory,all" in output


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, threads that wait for each other are a hundred times
    slower."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.real
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("variant", ["chunked", "shared", "masked", "sorted", "unsorted"])
def test_all_ways_of_the_plain_loop_are_the_same_training(variant: str) -> None:
    from agentloop.models import SMALL
    from agentloop.training.learner_client.settings import LearnerSettings
    from bench.plain_loop import Plain

    settings = LearnerSettings(model=SMALL, micro_batch_tokens=300, head_chunk_tokens=64)
    batch = agentic_batch(8, 480, 512)  # samples of 82, 113, 111 and 174 tokens
    expected, measured = (Plain(settings, variant_name) for variant_name in ("packed", variant))
    for _ in range(2):
        reference, result = expected.step(batch), measured.step(batch)
        assert result == pytest.approx(reference, rel=1e-3, abs=1e-5)
