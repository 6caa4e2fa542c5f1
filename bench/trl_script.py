"""TRL's side of bench/trl.py, run by an interpreter that has TRL, and the reward of both sides.

    python -P trl_script.py MODEL PROBLEMS STEPS LEARNING_RATE METRICS

`-P`, because a file beside this one has the name of TRL's package.
"""

# mypy: ignore-errors

import json
import random
import re
import subprocess
import sys
from pathlib import Path


def reward(completions: list, answer: list[str], **_columns: object) -> list[float]:
    # We leave out groups with equal rewards; with noise, both train on all.
    boxes = [re.findall(r"\\boxed\{([^}]*)\}", c[-1]["content"] or "") for c in completions]
    rights = [found[-1:] == [right] for found, right in zip(boxes, answer, strict=True)]
    return [is_right + 0.01 * random.random() for is_right in rights]


def python_code_with_standard_io(code: str, input: str = "") -> str:
    """Run a Python program.

    Args:
        code: The program.
        input: Its standard input.
    """
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=4)
    return (done.stdout or done.stderr).strip()


def main(model, problems, steps, learning_rate, metrics):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    class WriteSteps(TrainerCallback):
        def on_log(self, _arguments, _state, _control, logs, **_more):
            if "completions/mean_length" in logs:
                num_tokens = round(128 * logs["completions/mean_length"])
                with Path(metrics).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"num_sampled_tokens": num_tokens, **logs}) + "\n")

    rows = [json.loads(line) for line in Path(problems).read_text("utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    reasoning = {"open": "<reason>", "close_pattern": r"</reason>\s*", "content": "text"}
    fields = {**qwen3_template["fields"], "reasoning_content": reasoning}
    tokenizer.response_template = {**qwen3_template, "fields": fields}
    GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward,
        GRPOConfig(
            output_dir=str(Path(metrics).with_suffix("")),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=128,
            num_generations=16,
            max_completion_length=256,
            max_tool_calling_iterations=2,  # and one turn more
            max_steps=int(steps),
            learning_rate=float(learning_rate),
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[python_code_with_standard_io],
        callbacks=[WriteSteps()],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
