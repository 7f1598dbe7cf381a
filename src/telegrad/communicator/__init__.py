"""Communicators, the work they do, and how the processes of a job find each other."""

from telegrad.communicator.communicator import Communicator, join
from telegrad.communicator.cuda.entries import DeviceEntries
from telegrad.communicator.operands import CustomReduction
from telegrad.communicator.reductions import ReduceOp
from telegrad.communicator.topk import BoundedTopkState, GTopkState, OkTopkState, TopkReport, TopkSum
from telegrad.communicator.work import Work

__all__ = [
    "BoundedTopkState",
    "Communicator",
    "CustomReduction",
    "DeviceEntries",
    "GTopkState",
    "OkTopkState",
    "ReduceOp",
    "TopkReport",
    "TopkSum",
    "Work",
    "join",
]
