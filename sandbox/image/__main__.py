"""`python -m sandbox.image build`: make the image now rather than on the first use."""

from __future__ import annotations

import argparse
import sys

import anyio

from sandbox.engine import connect
from sandbox.errors import SandboxUnavailable
from sandbox.image.build import Method, build_image, ensure_image, image_tag


async def build(engine: str, method: Method, again: bool) -> None:
    async with connect(engine) as docker:
        if again or method != "auto":
            await build_image(docker, print, method)
        else:
            print(f"In place: {await ensure_image(docker, '', print)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sandbox.image", description=__doc__)
    parser.add_argument("action", choices=["build", "tag"])
    parser.add_argument("--engine", default="", help="unix:///path or tcp://host:port")
    parser.add_argument("--method", default="auto", choices=["auto", "dockerfile", "mmdebstrap"])
    parser.add_argument("--again", action="store_true", help="build even if it is there")
    args = parser.parse_args()
    if args.action == "tag":
        print(image_tag())
        return 0
    try:
        anyio.run(build, args.engine, args.method, args.again)
    except SandboxUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
