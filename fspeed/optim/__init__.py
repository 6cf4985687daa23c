"""Optimizers in optax's protocol, with its names, argument names and defaults."""
