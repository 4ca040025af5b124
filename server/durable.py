"""Where the server finds `protocol.durable`."""

from atoll.protocol.durable import DiskFull as DiskFull
from atoll.protocol.durable import naming_full_disk as naming_full_disk
from atoll.protocol.durable import told_outside as told_outside
from atoll.protocol.durable import write_atomically as write_atomically
