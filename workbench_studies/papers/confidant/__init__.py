"""Confidant's tables, counted and computed."""
