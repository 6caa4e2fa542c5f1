"""`python -m tools.small_model --out DIR`: make the small model, measure it, write its card.

--out DIR      where the model's files go (an existing model there is replaced)
--steps N      training steps (default: those of the shipped model)
--seed N       seed of data and weights (default 0)
--cases N      held-out dialogues per skill; 0 skips the evaluation (default 200)
--show-wrong N print up to N failed dialogues per skill
--evaluate DIR measure the model in DIR and write nothing
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.small_model import ship
from tools.small_model.evaluate import Case, evaluate
from tools.small_model.train import SmallModelSettings, make_tokenizer, train


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.small_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path)
    target.add_argument("--evaluate", type=Path)
    parser.add_argument("--steps", type=int, default=SmallModelSettings.steps)
    parser.add_argument("--seed", type=int, default=SmallModelSettings.seed)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--show-wrong", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.cases < 0:
        parser.error("--steps must be at least 1, --cases at least 0")
    if options.evaluate is not None and not (options.evaluate / ship.WEIGHTS).is_file():
        parser.error(f"--evaluate: there is no {ship.WEIGHTS} in {options.evaluate}")
    if options.out is not None:
        try:  # before the training, not after it
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: {error}")
    console = Console(stderr=True)

    def report(skill: str, cases: list[Case]) -> None:
        wrong = [case.wrong for case in cases if case.wrong]
        console.print(f"{skill:45} {1 - len(wrong) / len(cases):7.1%}", highlight=False)
        for text in wrong[: options.show_wrong]:
            console.print(f"    {text}", markup=False, highlight=False)

    if options.evaluate is not None:
        evaluate(*ship.load(options.evaluate), num_cases=options.cases, report=report)
        return 0
    settings = SmallModelSettings(steps=options.steps, seed=options.seed)
    started = time.monotonic()
    tokenizer = make_tokenizer(settings.seed)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as bar:
        task = bar.add_task("", total=settings.steps, loss=float("nan"))

        def progress(step: int, loss: float) -> None:
            bar.update(task, completed=step, loss=loss)
            if not console.is_terminal and step % 100 == 0:
                console.print(f"step {step}: loss {loss:.4f}", highlight=False)

        model = train(tokenizer, settings, progress)
    minutes = (time.monotonic() - started) / 60
    ship.save(model, tokenizer, options.out)
    accuracies: dict[str, float] = {}
    if options.cases:
        accuracies = evaluate(*ship.load(options.out), num_cases=options.cases, report=report)
    ship.write_card(options.out, settings, accuracies, minutes=minutes, num_cases=options.cases)
    console.print(f"{options.out}: weights {ship.digest(options.out)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
