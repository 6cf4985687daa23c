"""Meshes, collectives with their transposes, and pieces of sharded values."""
