"""`python -m agentloop.sandbox.image build`: make the image now rather than on the first use."""

from __future__ import annotations

import argparse
import sys

import anyio

from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.image.build import build_image, ensure_image


async def build(options: argparse.Namespace) -> None:
    async with connect(options.engine, timeout_s=60, on_progress=print) as docker:
        if options.base:
            await build_image(docker, print, packages=options.package, base=options.base)
        else:
            print("In place:", await ensure_image(docker, "", print, options.package))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agentloop.sandbox.image", description=__doc__)
    parser.add_argument("action", choices=["build"])
    parser.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="add a package, such as math-verify==0.8.0; for pools with the same `packages`",
    )
    parser.add_argument("--engine", default="", help="unix:///path or tcp://host:port")
    parser.add_argument(
        "--base",
        default="",
        metavar="IMAGE",
        help="pull another base than the Dockerfile's, such as one with a digest or of a mirror",
    )
    try:
        anyio.run(build, parser.parse_args())
    except SandboxUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
