"""Parameters of a request that say how tokens are sampled, and what they are for SGLang.

temperature, seed, ... ──────────> Sampling: what training samples with, too
penalties, biases, min_tokens ───> parameters of SGLang alone, for each generation
stop, stop_token_ids, ignore_eos > where a generation ends
"""

from __future__ import annotations

from typing import Annotated

import pydantic

from agentloop.errors import RequestError

StopSequence = Annotated[str, pydantic.Field(min_length=1, max_length=256)]
_TokenId = Annotated[str, pydantic.Field(pattern="^[0-9]{1,9}$")]
_Bias = Annotated[float, pydantic.Field(ge=-100, le=100)]

# SGLang's parameter for each, and the value with which it has no effect.
_SERVER_PARAMETERS: dict[str, tuple[str, float]] = {
    "frequency_penalty": ("frequency_penalty", 0),
    "presence_penalty": ("presence_penalty", 0),
    "repetition_penalty": ("repetition_penalty", 1),
    "min_tokens": ("min_new_tokens", 0),
}


class StreamOptions(pydantic.BaseModel):
    include_usage: bool | None = None


class SamplerFields(pydantic.BaseModel):
    """Parameters that say how a token is chosen, of all protocols."""

    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=-1, le=1 << 30)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    seed: int | None = pydantic.Field(None, ge=-(1 << 63), lt=1 << 63)
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    repetition_penalty: float | None = pydantic.Field(None, gt=0, le=2)


class SamplingFields(SamplerFields):
    """Parameters that chat completions and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = pydantic.Field(None, ge=1, le=128)
    logit_bias: dict[_TokenId, _Bias] | None = None
    min_tokens: int | None = pydantic.Field(None, ge=0, lt=1 << 31)
    stop: StopSequence | Annotated[list[StopSequence], pydantic.Field(max_length=4)] | None = None
    stop_token_ids: (
        Annotated[
            list[Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]], pydantic.Field(max_length=64)
        ]
        | None
    ) = None
    ignore_eos: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens that a choice may have."""
        raise NotImplementedError

    def sampling_overrides(self) -> dict[str, object]:
        """Return the fields of `Sampling` that the request sets."""
        names = ("temperature", "top_p", "top_k", "min_p")
        overrides = {name: value for name in names if (value := getattr(self, name)) is not None}
        # SGLang does not accept negative seeds.
        return overrides if self.seed is None else {**overrides, "seed": self.seed % (1 << 63)}

    def server_parameters(self) -> dict[str, object]:
        """Return SGLang's parameters for what the request sets besides `Sampling`.

        A server counts the tokens of one generation: in an agent's answer, those of each turn.

        Raises:
            RequestError: They contradict each other.
        """
        limit = self.token_limit
        if self.min_tokens and limit is not None and self.min_tokens > limit:
            raise RequestError(f"min_tokens: {self.min_tokens} are more than the limit of {limit}")
        if self.stop_token_ids and self.ignore_eos:
            raise RequestError("stop_token_ids: no token ends a generation with ignore_eos")
        parameters: dict[str, object] = {}
        for field, (name, neutral) in _SERVER_PARAMETERS.items():
            value = getattr(self, field)
            if value is not None and value != neutral:
                parameters[name] = value
        if self.logit_bias:
            parameters["logit_bias"] = {str(int(id)): bias for id, bias in self.logit_bias.items()}
        return parameters

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
