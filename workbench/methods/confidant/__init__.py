"""Confidant: an asynchronous pipeline over unlike devices, each within its memory."""
