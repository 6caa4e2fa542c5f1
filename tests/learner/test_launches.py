"""How many operations, each a launch on a GPU, a step takes beside the model's own passes."""

from __future__ import annotations

import json
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from tests.learner.ranks import make_batch, started
from tests.learner.test_bfloat16 import TINY
from tests.learner.test_ranks import SETTINGS

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SIZES = (24, 24, 24, 24)
VIEWS = ("view", "detach", "alias", "slice", "select", "t", "transpose", "expand", "unsqueeze")


def count_in(folder: Path) -> None:
    """Let a rank write the operations of its passes backward and of its last step."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not any(name in function.__name__ for name in VIEWS):
                self.names.append(function.__name__)
            return function(*args, **kwargs or {})

    def counting(name: str) -> None:
        method = getattr(DeepSpeedEngine, name)

        @wraps(method)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            with Counted() as mode:
                result = method(self, *args, **kwargs)
            (folder / f"{name}.json").write_text(json.dumps(mode.names))
            return result

        setattr(DeepSpeedEngine, name, counted)

    counting("step")
    counting("backward")


def counts(folder: Path, num_layers: int) -> tuple[list[str], list[str]]:
    """Return the operations of a step's end, and of a pass backward."""
    folder.mkdir()
    config = TINY | {"num_hidden_layers": num_layers}
    more = {"zero_stage": 1, "dtype": "bfloat16", "init": "random", "config": config}
    with started(folder, SETTINGS.model_copy(update=more), 1, before=count_in) as ranks:
        make_batch(1, SIZES).save(folder / "batch")
        for _ in range(2):
            assert not ranks.ask("step", batch=folder / "batch")["skipped"]
    step, backward = (json.loads((folder / f"{n}.json").read_text()) for n in ("step", "backward"))
    return step, backward


def test_number_of_operations_beside_the_passes_is_small(tmp_path: Path) -> None:
    few, few_backward = counts(tmp_path / "few", 1)
    many, many_backward = counts(tmp_path / "many", 3)
    assert len(many) == len(few), "the end of a step does not depend on the number of layers"
    layers = Counter(many_backward) - Counter(few_backward)
    assert layers["add_.Tensor"] == 2 * 11, "each of a layer's gradients is added by one operation"
