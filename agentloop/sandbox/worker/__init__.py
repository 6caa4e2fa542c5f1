"""The worker: runs untrusted Python, one call at a time or one session. Stdlib only.

    supervisor <-- frames --> server <-- SEQPACKET --> zygotes --fork--> children

The server (pid 1 of its container or namespace) holds the only connection to the supervisor,
reads the output pipes, keeps the deadlines, kills and cleans. A zygote has its modules loaded
and warmed; it forks when told and says how each child ended. Children are forked ahead of their
calls. A child becomes the uid of calls when its job arrives, says that it has started, and keeps no
descriptor but 0, 1 and 2 (in a session the one that brings the next cell, too): what it wants to
report goes into a mapping that the server reads once the child is dead.

When a call has ended, everything of its uid is killed and its directory emptied before the next one
begins. Nothing else runs in the worker's cgroup, so what that uses is the call's.

What a child can lie about: its own `result` and `error`, and in a session, which shares its process
with all that its cells do, that a cell has ended and with which exit code. Never how its process
ended, whether its program began, output counts, times, or anything of another call.

A small call costs what its page faults cost: every page that a child writes to is copied, and a
Python object's reference count is a write. So the zygote does once what can be done once, makes
what it has loaded immortal, and rehearses a call before the first fork.

The sources travel over the connection: nothing of ours is in the image, and no stale copy is run.
"""
