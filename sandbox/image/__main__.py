"""`python -m agentloop.sandbox.image build`: make the image now rather than on the first use."""

from __future__ import annotations

import argparse
import sys

import anyio

from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.image.build import build_image, ensure_image, image_tag


async def build(options: argparse.Namespace) -> None:
    async with connect(options.engine, timeout_s=60, on_progress=print) as docker:
        if options.again or options.base or options.method != "auto":
            await build_image(
                docker, print, options.method, packages=options.package, base=options.base
            )
        else:
            name = await ensure_image(docker, "", print, options.package)
            print(f"In place: {name}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agentloop.sandbox.image", description=__doc__)
    parser.add_argument("action", choices=["build", "tag"])
    parser.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="add a package, such as math-verify==0.8.0; for pools with the same `packages`",
    )
    parser.add_argument("--engine", default="", help="unix:///path or tcp://host:port")
    parser.add_argument("--method", default="auto", choices=["auto", "dockerfile", "mmdebstrap"])
    parser.add_argument(
        "--base",
        default="",
        metavar="IMAGE",
        help="pull another base than the Dockerfile's, such as one with a digest or of a mirror",
    )
    parser.add_argument("--again", action="store_true", help="build even if it is there")
    options = parser.parse_args()
    if options.action == "tag":
        print(image_tag(options.package))
        return 0
    try:
        anyio.run(build, options)
    except SandboxUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
