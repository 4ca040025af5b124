"""Masked updates, file to file: the words of an update and the streams that mask them, whole or in a mesh's boxes."""
