"""Training: groups in, new weights out; the learner's processes are its own."""
