"""A stream of requests served by Galaxy+ while devices slow down, are lost and come back (Galaxy+, sections III-E and
IV-F).
"""
