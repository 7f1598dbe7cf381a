"""Communicators, the work they do, and how the processes of a job find each other."""

from telegrad.comm.communicator import Communicator
from telegrad.comm.device.entries import DeviceEntries
from telegrad.comm.reduction import ReduceOp
from telegrad.comm.topk import TopkReport, TopkSum
from telegrad.comm.topk_state import BoundedTopkState, GTopkState, OkTopkState
from telegrad.comm.work import Work

__all__ = [
    "BoundedTopkState",
    "Communicator",
    "DeviceEntries",
    "GTopkState",
    "OkTopkState",
    "ReduceOp",
    "TopkReport",
    "TopkSum",
    "Work",
]
