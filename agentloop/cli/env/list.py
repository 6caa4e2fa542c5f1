"""`agentloop env list`: list the environments that installed packages register."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from agentloop.cli import console
from agentloop.environments.registry import GROUP, registered


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop env list",
        description="List the environments that installed packages register, for use as env=NAME. "
        "Nothing is imported.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    options = parser.parse_args(arguments)
    environments = registered()
    if options.json:
        console.print_json([asdict(environment) for environment in environments])
    elif environments:
        rows = [
            (environment.name, environment.target, environment.package)
            for environment in environments
        ]
        console.print_table(("name", "environment", "package"), rows)
    else:
        print(f"No installed package registers an environment (entry points in the group {GROUP})")
    return 0
