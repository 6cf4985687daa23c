"""Ops: each a folder with a plain reference, a CPU path and a Triton kernel."""
