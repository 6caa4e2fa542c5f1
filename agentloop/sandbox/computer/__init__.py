"""Computers: containers with a root file system, shells and files of their own, for tasks."""

from agentloop.sandbox.computer.command import CommandResult
from agentloop.sandbox.computer.computer import Computer, ComputerShell, Snapshot
from agentloop.sandbox.computer.machine import ComputerLimits

__all__ = ["CommandResult", "Computer", "ComputerLimits", "ComputerShell", "Snapshot"]
