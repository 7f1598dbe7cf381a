"""The doctor's checks, in the order in which they are shown."""

from __future__ import annotations

from telegrad.doctor import host, installation, network, transports
from telegrad.doctor.finding import Check

_SLACK_S = 5.0  # so that what a check waits for itself is told by the check

CHECKS: tuple[Check, ...] = (
    Check("core", installation.core, timeout_s=20.0, essential=True, mend="install telegrad again: pip install ."),
    Check("ranks", transports.ranks, timeout_s=transports.MEETING_S + _SLACK_S, essential=True),
    Check("shared memory", transports.shared_memory, timeout_s=transports.MEETING_S + _SLACK_S),
    Check("tcp", transports.tcp, timeout_s=transports.MEETING_S * transports.MOST_INTERFACES + _SLACK_S),
    Check("rdma", transports.rdma, timeout_s=transports.MEETING_S + 15.0),
    Check("single copy", transports.single_copy, timeout_s=15.0),
    Check("/dev/shm", host.shared_memory_size),
    Check("pages", host.pages),
    Check("limits", host.limits),
    Check("cores", host.cores),
    Check("interfaces", network.interfaces),
    Check(
        "host name",
        network.host_name,
        timeout_s=8.0,
        mend="name resolution hangs, and jobs will: look at /etc/resolv.conf, add this host to /etc/hosts",
    ),
    Check("gpu", installation.gpu, timeout_s=15.0),
    Check("torch", installation.torch, timeout_s=installation.TORCH_S + _SLACK_S),
    Check("mpi", installation.mpi, timeout_s=15.0),
    Check("laboratory", network.laboratory, timeout_s=20.0),
    Check("extras", installation.extras),
)
