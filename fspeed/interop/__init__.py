"""Other systems: JAX, DeepSpeed."""
