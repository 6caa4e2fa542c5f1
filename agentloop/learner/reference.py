"""The reference policy of the KL term: the weights that training started from.

    LoRA         the model itself, with the adapters scaled to 0: takes no memory
    ZeRO 3       a frozen copy, sharded over the ranks like the policy
    otherwise    a frozen copy in each rank's host memory, on the device while it scores

A run that continues from a checkpoint has the same reference: it is loaded from the model's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from agentloop.learner.lora import adapted_layers, adapters_off
from agentloop.plain_json import JsonObject

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from agentloop.learner.world import World


class Reference:
    """The reference policy, on this rank."""

    def __init__(
        self, scorer: torch.nn.Module, place: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """
        Args:
            scorer: scores tokens once `place` is entered.
        """
        self._scorer, self._place = scorer, place

    @classmethod
    def of(
        cls,
        engine: DeepSpeedEngine,
        load: Callable[[], torch.nn.Module],
        world: World,
        *,
        zero: JsonObject,
        dtype: str,
    ) -> Reference:
        """Create the reference of a policy that has not been trained yet.

        Args:
            load: loads the initial model, as the policy's engine was given it.
            zero: DeepSpeed's settings of ZeRO, those of the policy.
        """
        if adapted_layers(engine.module):
            return cls(engine, partial(adapters_off, engine.module))
        frozen = load().requires_grad_(False).eval()
        if zero["stage"] < 3:
            return cls(frozen, partial(_on_device, frozen, world))
        import deepspeed

        config: dict[str, object] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {k: v for k, v in zero.items() if k != "offload_optimizer"},
        }
        if dtype == "bfloat16":
            config["bf16"] = {"enabled": True}
        sharded, *_ = deepspeed.initialize(model=frozen, config=config, dist_init_required=False)
        sharded.eval()
        return cls(sharded, nullcontext)

    @contextmanager
    def scorer(self) -> Iterator[torch.nn.Module]:
        """Return the reference in the place of the policy's engine."""
        with self._place():
            yield self._scorer


@contextmanager
def _on_device(model: torch.nn.Module, world: World) -> Iterator[None]:
    try:
        model.to(world.device)
        yield
    finally:
        model.to("cpu")
