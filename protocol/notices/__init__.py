"""Notices: what a person has to know, once for each condition and hour, and its delivery; below `identity`.

It may import the settings, files and threads of the room.
"""
