"""The recipe of the small model that ships in `agentloop/models/small`.

problems -> episodes (a teacher's dialogues) -> train -> evaluate -> a directory that SGLang and
transformers load. `python -m tools.small_model --out DIR` runs all of it.
"""
