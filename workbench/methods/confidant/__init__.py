"""Confidant: an asynchronous pipeline over heterogeneous devices, each within its memory."""
