"""Evaluate a model: sample each task k times, score the samples and estimate the uncertainty."""
