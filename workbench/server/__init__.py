"""Texts over HTTP in the convention of OpenAI's API, from one process or from Galaxy+'s devices; and a chat page."""
