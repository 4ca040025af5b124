"""Pieces for reading: collectives by hand, an interface like that of Horovod, sharpness, the critical batch size."""
