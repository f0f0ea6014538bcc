"""Figures that one notebook alone draws."""
