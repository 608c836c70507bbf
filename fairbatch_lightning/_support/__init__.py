"""Support: what every room needs and none is about.

Warnings, random numbers, checks of arguments, interrupts, processes and devices; and `lightning.py`, every touch of
Lightning's private parts.
"""
