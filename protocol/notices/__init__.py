"""Notices: what an operator has to know, at most hourly for each condition, and its delivery.

It may import the settings, files and threads of the room.
"""
