"""The learner: trains on finished groups and produces new weights, in processes of its own."""
