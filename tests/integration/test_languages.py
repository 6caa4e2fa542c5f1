"""Programs in C++, JavaScript and bash in containers of an image that has what they need."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiodocker
import pytest

from agentloop.sandbox import Pool, PoolSettings
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.image.build import has_image, image_tag
from agentloop.sandbox.languages import Language
from tests.integration.conftest import need

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ADDED = ["debian:g++", "debian:nodejs"]
SETTINGS = PoolSettings(backend="docker", workers=2, preload=[], packages=ADDED)
DOUBLE = (
    "#include <bits/stdc++.h>\n"
    "int main() { int n; std::cin >> n; std::cout << 2 * n << std::endl; return n == 7 ? 3 : 0; }"
)
ALLOCATE = "#include <vector>\nint main() { std::vector<char> v(2000000000, 1); return v[5]; }"
FLOOD = '#include <cstdio>\nint main() { for (;;) puts("abcdefghijklmnopqrstuvwxyz"); }'
READ = "console.log(2 * Number(require('fs').readFileSync(0, 'utf8')))"
FILL = "const kept = []; for (;;) kept.push(new Array(100000).fill(1));"


@pytest.fixture(scope="module")
async def pool(docker_engine: None, anyio_backend: str) -> AsyncIterator[Pool]:
    async with connect(timeout_s=60) as docker:
        was_there = await has_image(docker, image_tag(ADDED))
        try:
            async with Pool(SETTINGS, on_progress=print) as pool:
                yield pool
        except SandboxUnavailable as error:
            need(f"an image with {' and '.join(ADDED)}: {error}")
        finally:
            if not was_there:
                with contextlib.suppress(aiodocker.DockerError):
                    await docker.images.delete(image_tag(ADDED), force=True)


@pytest.mark.parametrize(
    ("language", "code", "end"),
    [
        ("cpp", DOUBLE, ("ok", 0, "42\n")),
        ("cpp", DOUBLE.replace("7", "21"), ("error", 3, "42\n")),
        ("cpp", "int main() { *(volatile int *)0 = 1; }", ("killed", None, "")),
        ("cpp", "int main() { for (;;); }", ("timeout", None, "")),
        ("cpp", ALLOCATE, ("oom", None, "")),
        ("javascript", READ, ("ok", 0, "42\n")),
        ("javascript", "setTimeout(() => console.log('later'), 50)", ("ok", 0, "later\n")),
        ("javascript", "process.exit(4)", ("error", 4, "")),
        ("javascript", FILL, ("oom", None, "")),
        ("bash", "read n; echo $((2 * n))", ("ok", 0, "42\n")),
    ],
)
async def test_program_ends_as_its_language_says(
    pool: Pool, language: Language, code: str, end: tuple[str, int | None, str]
) -> None:
    result = await pool.run(
        code, "21", timeout_s=4 if end[0] == "timeout" else 60, language=language
    )
    assert (result.status, result.exit_code, result.stdout) == end, result


async def test_output_of_a_program_is_limited(pool: Pool) -> None:
    result = await pool.run(FLOOD, timeout_s=60, language="cpp")
    assert result.status == "output_limit"


async def test_program_that_does_not_compile_fails(pool: Pool) -> None:
    unknown = await pool.run("int main() { return x; }", language="cpp")
    assert unknown.error is not None
    assert (unknown.status, unknown.error.type) == ("error", "CompileError")
    assert "'x' was not declared" in unknown.error.message
    endless = await pool.run('#include "/dev/zero"', language="cpp")
    assert endless.error is not None
    assert (endless.status in ("oom", "timeout"), endless.error.type) == (True, "CompileError")
