"""Settings of the chat format."""

from __future__ import annotations

import pydantic

from agentloop.config import path_of

RESERVED_ARGUMENTS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""Names that `ChatSettings.arguments` may not have: parameters of transformers' own.

A client could otherwise set them by `chat_template_kwargs`, and so replace the template.
"""


class ChatSettings(pydantic.BaseModel):
    """Overrides for the chat template and end token of the model's folder."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    format: str = pydantic.Field(
        "auto",
        description="What the model samples: tool calls, thoughts. auto: by its chat template. "
        "docs/models.md lists the formats.",
    )
    template: str | None = pydantic.Field(
        None,
        description="Jinja file, or the template's text, to use instead of the model's own chat "
        "template; paper: that of the paper's recipes. A model that is trained with it is "
        "published with it.",
    )
    end_token: str | None = pydantic.Field(
        None,
        description="Token that ends an assistant's turn. By default, the first control token that "
        "the chat template writes after an assistant message.",
    )
    arguments: dict[str, object] = pydantic.Field(
        default_factory=dict,
        description="Extra variables for the chat template, such as enable_thinking = false for "
        "Qwen3.",
    )

    @pydantic.field_validator("arguments")
    @classmethod
    def _check_not_reserved(cls, value: dict[str, object]) -> dict[str, object]:
        if taken := sorted(RESERVED_ARGUMENTS & value.keys()):
            raise ValueError(f"{', '.join(taken)}: reserved, set by agentloop for each prompt")
        return value

    @pydantic.field_validator("template")
    @classmethod
    def _read(cls, value: str | None) -> str | None:
        """Return the template's text, so that a run keeps it even if the file changes or moves."""
        if value is None or "{" in value:
            return value
        try:
            text = path_of(value, ".jinja").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{value!r} cannot be read: {reason}") from error
        if "{" not in text:
            raise ValueError(f"{value!r} is not a Jinja template: it contains no expression")
        return text
