"""Weight sync over a process group in which rank 0 is the sender.

    parameters ──gathered, bucket by bucket──> rank 0 ──broadcast──> every rank of every server
    open: create the store ──> join: wait for all ──> send: each bucket ──> leave

The servers' ranks are 1, 2, ... of the group; the learner's other ranks only take part in
gathering. A group lives for one weight sync. If it breaks, the request is refused and the learner
goes on: gloo reports it in time, NCCL at the group's deadline once its communicator stands.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from agentloop.learner.errors import ProcessGroupError, RankError
from agentloop.learner.policy import Policy, config_of
from agentloop.learner.weights import Shard, gather_values, split, trained_tensors
from agentloop.training.learner_client.protocol import (
    JoinRequest,
    LayoutReply,
    OpenReply,
    Reply,
    SendReply,
)
from agentloop.training.weight_sync.checksums import Tensor, checksum, parts_of
from agentloop.training.weight_sync.layout import Layout

_ASKED = ("model_type", "num_attention_heads", "num_key_value_heads", "dtype")
_MAX_THREADS = 16
_WATCHDOG_SLACK_S = 60.0  # NCCL's watchdog would end the process: let our own timeout come first


@dataclass(frozen=True, slots=True)
class _Group:
    process_group: dist.ProcessGroup
    name: str
    timeout: timedelta


class Broadcaster:
    """The sender's state on this rank. Requests go to all ranks; only rank 0 has the group."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._store: dist.Store | None = None
        self._group: _Group | None = None
        dtype = getattr(torch, policy.settings.publish_dtype)
        buckets = split(trained_tensors(policy, dtype), policy.settings.bucket_mib << 20)
        # Widest type first, so that each tensor is aligned when they are stored end to end.
        self._buckets: list[Shard] = [
            sorted(bucket, key=lambda tensor: -tensor.dtype.itemsize) for bucket in buckets
        ]
        self._parts = parts_of(tensor.name for bucket in self._buckets for tensor in bucket)
        self._fused_into = {part: name for name, parts in self._parts.items() for part in parts}
        self._sent: dict[str, Tensor] = {}  # sent parts of fused tensors that are still incomplete

    @property
    def backend(self) -> str:
        """Backend of a group on this learner's device."""
        return "nccl" if self._policy.world.device.type == "cuda" else "gloo"

    def check(self, num_updates: int, bucket: int = 0) -> None:
        """Check that the weights are those after `num_updates`, and that the bucket exists.

        Raises:
            RankError: They have been updated since, or it does not.
        """
        if not 0 <= bucket < len(self._buckets):
            raise RankError(f"bucket: {bucket} does not exist, there are {len(self._buckets)}")
        if num_updates != self._policy.num_updates:
            raise RankError(
                f"the weights after {num_updates} updates are gone: {self._policy.num_updates} "
                "are applied now"
            )

    def check_timeout(self, timeout_s: float) -> None:
        """Check that the other ranks would wait long enough for rank 0.

        Raises:
            RankError: They would not.
        """
        bound = self._policy.settings.collective_timeout_s
        if timeout_s >= bound:
            raise RankError(
                f"learner.collective_timeout_s: {bound:g} must be above {timeout_s:g}, "
                "for which rank 0 waits for servers"
            )

    def layout(self, out: Path) -> LayoutReply:
        """Write the content of each bucket to `out`.

        The file is [{"names": [...], "dtypes": [...], "shapes": [...]}, ...], in the order in which
        the tensors are stored end to end.
        """
        if self._policy.world.first:
            made = [self._describe(bucket) for bucket in self._buckets]
            partial = out.with_name(f".{out.name}.partial")
            partial.write_text(json.dumps(made), "utf-8")
            os.replace(partial, out)
        return LayoutReply(
            num_buckets=len(self._buckets),
            num_bytes=sum(self._spans(bucket)[-1][-1] for bucket in self._buckets),
            num_updates=self._policy.num_updates,
            backend=self.backend,
            model=self._model(),
        )

    def _model(self) -> dict[str, object]:
        """Return the part of the model's configuration that decides how servers store the
        weights."""
        config = config_of(self._policy.settings)
        config["dtype"] = config.get("dtype") or config.get("torch_dtype")  # the former name
        return {name: config.get(name) for name in _ASKED}

    def open(self, address: str) -> Reply:
        """Leave the previous group, if any, and create the store for a new one at a free port.

        Raises:
            ProcessGroupError: Listening there fails.
        """
        self.leave()
        self._sent.clear()
        if not self._policy.world.first:
            return Reply()
        try:
            listener = socket.create_server((address, 0), family=_family(address))
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        except (OSError, RuntimeError) as error:
            raise ProcessGroupError(
                f"weights.address: cannot listen at {address}: {error}"
            ) from error
        return OpenReply(port=port)

    def join(self, request: JoinRequest) -> Reply:
        """Wait until all members have joined.

        Raises:
            ProcessGroupError: A member did not join in time.
        """
        if not self._policy.world.first:
            return Reply()
        if self._store is None:
            raise ProcessGroupError("there is no group to join: call open first")
        name, timeout = request.name, timedelta(seconds=request.within_s)
        self._store.set_timeout(timeout)
        try:
            made = _process_group(request.backend, self._store, name, request.world_size, timeout)
        except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
            self.leave()
            raise ProcessGroupError(
                f"the group {name} could not be formed: {_reason(error)}"
            ) from error
        self._group = _Group(made, name, timeout)
        return Reply()

    def send(self, index: int, layout: Layout | None) -> Reply:
        """Gather a bucket on all ranks and broadcast it.

        With `layout`, the way the servers store the weights, the reply has `sums`: the checksums
        that each server rank must report for the tensors completed by this bucket.

        Raises:
            ProcessGroupError: Some members may not have received it.
        """
        bucket, first = self._buckets[index], self._policy.world.first
        places = self._spans(bucket)
        size = places[-1][-1]
        device = "cpu"
        if self._group is not None and dist.get_backend(self._group.process_group) == "nccl":
            device = self._policy.world.device
        flat = torch.empty(size if first else 0, dtype=torch.uint8, device=device)
        views: dict[str, torch.Tensor] = {}
        values = gather_values(bucket, keep=first)
        for (tensor, value), (start, end) in zip(values, places, strict=False):
            views[tensor.name] = flat[start:end].view(tensor.dtype).view(tensor.shape)
            views[tensor.name].copy_(value)
        if not first:
            return Reply()
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            sums = {} if layout is None else self._sums(views, layout, threads)
            self._broadcast(flat)  # meanwhile the threads compute the checksums
            results = {name: [future.result() for future in ranks] for name, ranks in sums.items()}
        return SendReply(num_bytes=size, sums=results)

    def _sums(
        self, views: dict[str, torch.Tensor], layout: Layout, threads: ThreadPoolExecutor
    ) -> dict[str, list[Future[str]]]:
        sums = {}
        for part, view in views.items():
            self._sent[part] = _tensor(view)
            name = self._fused_into[part]
            parts = self._parts[name]
            if self._sent.keys() >= set(parts):
                tensors = [*map(self._sent.pop, parts)]
                sums[name] = [
                    threads.submit(checksum, name, tensors, layout, rank)
                    for rank in range(layout.num_ranks)
                ]
        return sums

    def leave(self) -> Reply:
        """Destroy the group and the store; pending operations on either fail."""
        group, self._group, self._store = self._group, None, None
        if group is None:
            return Reply()
        try:
            if dist.get_backend(group.process_group) == "nccl":
                group.process_group.abort()  # else its watchdog would end the process
            dist.destroy_process_group(group.process_group)
        except RuntimeError as error:
            print(f"leaving the group {group.name} failed: {error}", flush=True)
        return Reply()

    def _broadcast(self, flat: torch.Tensor) -> None:
        group = self._group
        if group is None:
            raise ProcessGroupError("there is no group: call open and join first")
        try:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = 0, 0, group.timeout
            group.process_group.broadcast([flat], options).wait(group.timeout)
        except RuntimeError as error:
            self.leave()
            raise ProcessGroupError(f"the group {group.name} broke: {_reason(error)}") from error

    def _describe(self, bucket: Shard) -> dict[str, object]:
        return {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket],
            "shapes": [list(tensor.shape) for tensor in bucket],
        }

    def _spans(self, bucket: Shard) -> list[tuple[int, int]]:
        """Return (first byte, end) of each tensor, stored end to end."""
        ends = list(itertools.accumulate(tensor.num_bytes for tensor in bucket))
        return list(zip([0, *ends], ends, strict=False))


def _process_group(
    backend: str, store: dist.Store, name: str, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Create the group as SGLang's `init_custom_process_group` does.

    It uses the same private function: both ends must use the same keys in the store.
    """
    from torch.distributed import distributed_c10d as c10d

    slack = timedelta(seconds=_WATCHDOG_SLACK_S if backend == "nccl" else 0)
    made, _ = c10d._new_process_group_helper(
        size, 0, [], dist.Backend(backend), dist.PrefixStore(name, store), name,
        timeout=timeout + slack,
    )  # fmt: skip
    c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(size)}
    return made


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _tensor(view: torch.Tensor) -> Tensor:
    """Return the tensor in the host's memory; bfloat16 as uint16, because numpy lacks it."""
    held = view.to("cpu")
    numbers = held.view(torch.uint16) if held.dtype == torch.bfloat16 else held
    return Tensor(str(view.dtype).removeprefix("torch."), numbers.numpy())


def _reason(error: BaseException) -> str:
    """Return the message of an error of torch without its source line and its advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0]
