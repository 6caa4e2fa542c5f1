"""What the benchmark of sessions counts: of a long history only what is new is encoded."""

from __future__ import annotations

from aiohttp import ClientSession

from bench.sessions import Endpoint, Talk


async def test_length_of_a_history_does_not_change_what_is_encoded() -> None:
    endpoint = Endpoint(0.0)
    counts: list[int] = []
    async with endpoint.serving(), ClientSession() as http:
        talk = Talk(http, endpoint.url)
        await talk.open()
        for _ in range(20):
            before = endpoint.num_chars
            await talk.ask()
            counts.append(endpoint.num_chars - before)
    assert len(endpoint.begun) == sum(map(len, endpoint.engine.took_s.values())) == 20
    assert 0 < min(counts[1:]) == max(counts[1:])
