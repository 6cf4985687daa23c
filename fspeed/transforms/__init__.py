"""Transforms: each takes a step and returns a step."""
