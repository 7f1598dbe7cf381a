"""What the ranks of test_interface.py do: they join, and say on which addresses they listen."""

from __future__ import annotations

import json
import os
import socket
import struct

import numpy as np

from telegrad.launch import join

_LISTEN = "0A"


def listening() -> set[tuple[str, int]]:
    """Address and port of every socket of this process on which TCP connections are accepted, from /proc."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # that of listdir itself
        if target.startswith("socket:["):
            own.add(target[len("socket:[") : -1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in own:
                    address, port = fields[1].split(":")
                    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]  # of the host's order
                    packed = b"".join(struct.pack("=I", word) for word in words)
                    found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def join_and_tell(interface: str) -> None:
    before = listening()
    try:
        communicator = join(timeout_s=30.0, interface=interface or None)
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        return
    x = np.ones(100_000, np.float32)
    communicator.all_reduce(x)
    right = bool((x == communicator.world_size).all())
    print(json.dumps({"listens": sorted(address for address, _ in listening() - before), "right": right}))
    communicator.barrier()
    communicator.close()
