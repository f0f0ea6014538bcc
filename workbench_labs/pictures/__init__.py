"""The schematics in docs/pictures: what a method or a mechanism does, at a glance.

`python -m workbench_labs.pictures` draws them; where there is a schedule, from that schedule.
"""
