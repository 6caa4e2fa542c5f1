"""Rewards: rules, programs and processes that judge a trajectory."""
