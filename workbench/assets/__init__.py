"""Weights and data by package name, in a cache; whether the hub answers."""
