"""Environments of other libraries, unmodified. A module imports its library when it is used.

reasoning_gym:puzzle   puzzles, scored in the sandbox
textworld:game         text adventures
verifiers_v1:episode   a task set of verifiers 0.4
inspect_ai:sample      a task of Inspect: its data set, solver and scorer
openenv:episode        a server of OpenEnv, over its WebSocket
harbor:task            folders of Harbor tasks, each in a computer of its own
"""
